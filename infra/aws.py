"""AWS as a :class:`Cloud`: its region and this machine's public address."""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.error
import urllib.parse
import urllib.request

import boto3
from botocore.exceptions import BotoCoreError, NoCredentialsError
from botocore.utils import get_environ_proxies

from infra.cloud import DEFAULT_REGION, Cloud
from infra.credentials import explain_credentials
from infra.errors import CloudError, UsageError
from infra.session import open_session
from infra.validation import nearest

_ADDRESS_SERVICE = "https://checkip.amazonaws.com"
# SSH servers of AWS itself: https://docs.aws.amazon.com/codecommit/latest/userguide/regions.html#regions-git
_SSH_SERVICE, _SSH_PORT = "git-codecommit.{}.amazonaws.com", 22
# For example us-gov-west-1 and eusc-de-east-1.
_REGION = re.compile(
    r"[a-z]{2,4}(-(gov|iso[a-z]?|[a-z]{2}))?-(central|(north|south)?(east|west)?(?<!-))-\d+"
)


class NoRegionError(UsageError):
    """No AWS region is given or configured."""


def open_aws_cloud(region: str | None, *, buys: bool = False) -> Cloud:
    """Return AWS in the given region, else in the region of the AWS configuration.

    Raises :class:`NoRegionError` without a region: machines in an unexpected one are not found.
    """
    session = open_session(region, buys=buys)
    try:
        chosen = session.region_name
        if not chosen and session.get_credentials() is None:
            raise NoCredentialsError
    except BotoCoreError as error:
        raise explain_credentials(error) or CloudError(str(error)) from None
    if not chosen:
        raise NoRegionError(
            "no AWS region is configured",
            hint="--region us-east-1 chooses one, `aws configure set region us-east-1` sets the default",
        )
    _check_region(session, chosen)
    return Cloud(
        name="aws",
        region=chosen,
        caller_cidr=find_caller_cidr,
        probe_ssh=lambda: probe_ssh(chosen),
        billed=True,
        has_amx=True,
        default_bake="none",
        session=session,
    )


def _check_region(session: boto3.session.Session, region: str) -> None:
    """Raise :class:`UsageError` for a region that neither botocore nor DNS knows: retries take long."""
    parts = session.get_available_partitions()
    known = [name for part in parts for name in session.get_available_regions("ec2", part)]
    is_name = bool(_REGION.fullmatch(region))
    if region in known or (is_name and _has_endpoint(session, region)):
        return
    if not is_name and region[:-1] in known:
        raise UsageError(
            f"--region {region}: this is a zone", hint=f"use its region: --region {region[:-1]}"
        )
    raise UsageError(
        f"unknown region {region!r}{nearest(region, known, 2)}",
        hint="`aws account list-regions` lists this account's regions; if this one is new, check the network",
    )


def _has_endpoint(session: boto3.session.Session, region: str) -> bool:
    """Return whether EC2's endpoint in a region has an address, as far as can be told here."""
    url = session.client("ec2", region_name=region).meta.endpoint_url
    if get_environ_proxies(url):
        return True  # only the proxy needs DNS
    try:
        return bool(socket.getaddrinfo(urllib.parse.urlsplit(url).hostname, None))
    except socket.gaierror:
        return False


def find_caller_cidr() -> str:
    """Return this machine's public IPv4 address as a /32 range, as an AWS service sees it."""
    try:
        with urllib.request.urlopen(_ADDRESS_SERVICE, timeout=10) as answer:
            address = ipaddress.IPv4Address(answer.read(64).decode().strip())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CloudError(
            f"cannot determine this machine's public address from {_ADDRESS_SERVICE}: {error}",
            hint="specify the addresses that may use SSH: --ssh-cidr 203.0.113.7/32",
        ) from None
    return f"{address}/32"


def probe_ssh(region: str) -> str:
    """Return why no connection to port 22 leaves this machine's network; "" if one does.

    Two SSH servers of AWS are tried, and nothing is sent to them. A name that is not known says nothing.
    """
    reasons = []
    for server in dict.fromkeys(map(_SSH_SERVICE.format, (region, DEFAULT_REGION))):
        try:
            socket.create_connection((server, _SSH_PORT), timeout=5).close()
        except socket.gaierror:
            continue
        except OSError as error:
            reasons.append(f"{server}: {error}")
        else:
            return ""
    return "; ".join(reasons)
