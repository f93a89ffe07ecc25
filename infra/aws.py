"""AWS itself as a :class:`Cloud`: region, and the address by which it sees this machine."""

from __future__ import annotations

import ipaddress
import urllib.error
import urllib.request

import boto3
from botocore.exceptions import BotoCoreError

from infra.cloud import DEFAULT_REGION, Cloud
from infra.errors import CloudError, UsageError

_ADDRESS_SERVICE = "https://checkip.amazonaws.com"


def open_aws_cloud(region: str | None) -> Cloud:
    """AWS in the given region, else in the one that the AWS configuration names."""
    try:
        chosen = region or boto3.session.Session().region_name or DEFAULT_REGION
        known = boto3.session.Session().get_available_regions("ec2")
    except BotoCoreError as error:
        raise UsageError(f"AWS configuration can't be used: {error}") from None
    if chosen not in known and chosen.count("-") < 2:
        raise UsageError(f"unknown region {chosen!r}", hint=f"one of {', '.join(known)}")
    return Cloud(
        name="aws",
        region=chosen,
        caller_cidr=find_caller_cidr,
        default_stack="intel",
        billed=True,
        has_amx=True,
    )


def find_caller_cidr() -> str:
    """This machine's public IPv4 address as a /32 range, as AWS's own service sees it."""
    try:
        with urllib.request.urlopen(_ADDRESS_SERVICE, timeout=10) as answer:
            address = ipaddress.IPv4Address(answer.read(64).decode().strip())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CloudError(
            f"could not learn this machine's public address from {_ADDRESS_SERVICE}: {error}",
            hint="name the addresses that may use SSH: --ssh-cidr 203.0.113.7/32",
        ) from None
    return f"{address}/32"
