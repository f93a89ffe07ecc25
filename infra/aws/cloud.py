"""The cloud that hosts a cluster, and AWS as one: its session, credentials, region, and public address."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import boto3
import botocore.session
from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, NoCredentialsError
from botocore.utils import JSONFileCache, get_environ_proxies, parse_timestamp

from infra.errors import CloudError, UsageError
from infra.words import nearest

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Cloud:
    """An endpoint that speaks EC2, and its defaults.

    ``caller_cidr`` returns the address from which the cloud sees this machine, and ``probe_ssh`` why
    this machine's own network lets no connection out to port 22 ("" if it does, or if that is not known).
    """

    name: str
    region: str
    caller_cidr: Callable[[], str] = field(repr=False)
    billed: bool
    """Machines cost money, so the user confirms each purchase first."""
    has_amx: bool
    """Machines should have AMX. If false, missing AMX does not stop ``up``."""
    probe_ssh: Callable[[], str] = field(default=str, repr=False)
    default_bake: str = "head"
    """The fastest route to installed nodes without an image: see ``ClusterSpec.bake``."""
    base: str = ""
    """The machines' base system, if it is more than an Ubuntu release."""
    folder: str = ""
    """Where an embedded cloud keeps its state: this machine can have several."""
    endpoint_url: str | None = None
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    session: boto3.session.Session | None = field(default=None, repr=False, compare=False)
    """The user's AWS session, which all regions share."""


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


# The AWS CLI's: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-role.html#cli-configure-role-cache
_CACHE = "~/.aws/cli/cache"
# From the purchase to installed nodes: botocore cannot refresh a session with MFA.
_FOR_PURCHASE = timedelta(minutes=50)


class _RoleCache(JSONFileCache):
    """The AWS CLI's cache, which may be read-only, without credentials that end too soon."""

    def __init__(self, least: timedelta) -> None:
        super().__init__(os.path.expanduser(_CACHE))  # noqa: PTH111 - pathlib raises without a home
        self._least = least

    def __contains__(self, key: str) -> bool:
        try:
            expires = parse_timestamp(self[key]["Credentials"]["Expiration"])
            left = expires - datetime.now(timezone.utc)
        except (KeyError, TypeError, ValueError):
            return False
        return left >= self._least

    def __setitem__(self, key: str, value: Any) -> None:
        with suppress(OSError):
            super().__setitem__(key, value)


def open_session(region: str | None = None, *, buys: bool = False) -> boto3.session.Session:
    """Return the session of the AWS configuration, in a region: the given one, else the configured one.

    The temporary credentials of a role are shared with the AWS CLI: a role with MFA asks once an hour, not
    in each command, but before each purchase that could outlast them. STS accepts a code once.
    Raises :class:`UsageError` for an unusable configuration.
    """
    try:
        core = botocore.session.Session()
        session = boto3.session.Session(
            botocore_session=core,
            # botocore reads only AWS_DEFAULT_REGION: https://github.com/boto/boto3/issues/3620
            region_name=region or os.environ.get("AWS_REGION") or None,
        )
        roles = core.get_component("credential_provider").get_provider("assume-role")
        roles.cache = _RoleCache(_FOR_PURCHASE if buys else timedelta())
    except BotoCoreError as error:
        raise explain_credentials(error) or UsageError(
            f"AWS configuration can't be used: {error}"
        ) from None
    return session


def find_profile(session: boto3.session.Session | None) -> str:
    """Return the AWS profile that the credentials are from; "" for another source, such as variables."""
    credentials = session.get_credentials() if session else None
    if session is None or credentials is None or credentials.method == "env":
        return ""
    name = session.profile_name
    return name if name in session.available_profiles else ""


CREDENTIALS_HINT = (
    "run `aws configure`, `aws login`, or `aws sso login`, or set AWS_PROFILE; "
    "to try the tool without an account: --cloud local"
)
_SSO = (boto.SSOError, boto.TokenRetrievalError)
_UNUSABLE = (boto.CredentialRetrievalError, boto.InvalidConfigError, boto.ConfigParseError)
_NO_MFA_CODE = "an MFA code is accepted once: wait for the next one, and run the same command again"


class MissingCredentialsError(UsageError):
    """This machine has no AWS credentials at all."""


def _profile() -> str:
    """Return ``--profile`` for a command of the AWS CLI; botocore prefers AWS_DEFAULT_PROFILE, too."""
    name = os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")
    return f" --profile {shlex.quote(name)}" if name else ""


def explain_credentials(error: Exception) -> UsageError | None:
    """Return an error of the AWS configuration or its credentials for the user; ``None`` for others."""
    profile = _profile()
    if isinstance(error, boto.NoCredentialsError):
        return MissingCredentialsError("no AWS credentials found", hint=CREDENTIALS_HINT)
    if isinstance(error, boto.PartialCredentialsError):
        return UsageError(f"incomplete AWS credentials: {error}", hint=f"aws configure{profile}")
    if isinstance(error, boto.ProfileNotFound):
        return UsageError(
            f"AWS configuration can't be used: {error}",
            hint=f"`aws configure list-profiles` lists the profiles, `aws configure{profile}` makes this one",
        )
    if isinstance(error, _SSO):
        return UsageError(f"the SSO session has expired: {error}", hint=f"aws sso login{profile}")
    if isinstance(error, boto.LoginInsufficientPermissions):
        return UsageError(
            f"cannot use the AWS credentials: {error}",
            hint="ask an administrator for the policy SignInLocalDevelopmentAccess",
        )
    if isinstance(error, boto.LoginError):
        return UsageError(f"the AWS login has expired: {error}", hint=f"aws login{profile}")
    if isinstance(error, boto.RefreshWithMFAUnsupportedError):
        return UsageError(
            "the session of the role with MFA has expired",
            hint="run the same command again, which asks for a new code; duration_seconds in the profile "
            "makes sessions longer",
        )
    if isinstance(error, boto.MissingDependencyException):
        return UsageError(
            f"cannot use the AWS credentials: {error}", hint="uv pip install 'boto3[crt]'"
        )
    if isinstance(error, _UNUSABLE):
        return UsageError(f"cannot use the AWS credentials: {error}", hint=CREDENTIALS_HINT)
    return None


def explain_role(operation: str, detail: str) -> UsageError | None:
    """Return why a profile's role could not be assumed; ``None`` for another operation."""
    if not operation.startswith("AssumeRole"):
        return None
    hint = "may these credentials assume the role? `aws sts get-caller-identity` names them"
    return UsageError(
        f"the profile's role can't be assumed: {detail}",
        hint=_NO_MFA_CODE if "MultiFactorAuthentication" in detail else hint,
    )
