"""The cloud that hosts a cluster, and AWS's session, credentials, and region."""

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
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, NoCredentialsError
from botocore.utils import JSONFileCache, get_environ_proxies, parse_timestamp

from infra.aws.api_time import FIX_CLOCK
from infra.errors import CloudError, UsageError
from infra.words import nearest, spoken_time

DEFAULT_REGION = "us-east-1"


def cloud_flag(cloud: str | None) -> str:
    """Return the option for a command about one of a cloud's buckets: " --cloud local", or ""."""
    return " --cloud local" * (cloud == "local")


@dataclass(frozen=True)
class Cloud:
    """An endpoint that speaks EC2's API, and its defaults.

    ``caller_cidr`` returns this machine's address as the cloud sees it. ``probe_ssh`` explains why
    this machine's network blocks outgoing SSH; "" if it does not, or if that is unknown.
    """

    name: str
    region: str
    caller_cidr: Callable[[], str] = field(repr=False)
    billed: bool
    """Machines cost money, so the user confirms each purchase first."""
    has_amx: bool
    """Whether machines should have AMX; if not, ``up`` tolerates missing AMX."""
    probe_ssh: Callable[[], str] = field(default=str, repr=False)
    default_bake: str = "head"
    """The default of ``ClusterSpec.bake``: the fastest way to install nodes without an image."""
    base: str = ""
    """Identifies the base system if that is not just an Ubuntu release."""
    settle_s: float = 10.0
    """Time between two listings that must agree before resources count as gone: EC2's lag by seconds."""
    folder: str = ""
    """The state folder of an embedded cloud; a machine can have several."""
    endpoint_url: str | None = None
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    session: boto3.session.Session | None = field(default=None, repr=False, compare=False)
    """The user's AWS session, which all regions share."""

    @property
    def flag(self) -> str:
        """The option for a command about one of its buckets: " --cloud local", or ""."""
        return cloud_flag(self.name)


_ADDRESS_SERVICE = "https://checkip.amazonaws.com"
# AWS's own SSH servers: https://docs.aws.amazon.com/codecommit/latest/userguide/regions.html#regions-git
_SSH_SERVICE, _SSH_PORT = "git-codecommit.{}.amazonaws.com", 22
# For example us-gov-west-1 and eusc-de-east-1.
_REGION = re.compile(
    r"[a-z]{2,4}(-(gov|iso[a-z]?|[a-z]{2}))?-(central|(north|south)?(east|west)?(?<!-))-\d+"
)


class NoRegionError(UsageError):
    """No AWS region is given or configured."""


def open_aws_cloud(region: str | None, *, buys: bool = False) -> Cloud:
    """Return AWS in the given region, else in the region of the AWS configuration.

    Raises :class:`NoRegionError` if there is neither: with a guessed region, users lose track of machines.
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
            hint="--region us-east-1 selects one, `aws configure set region us-east-1` sets the default",
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
    """Raise :class:`UsageError` for an unknown region now; otherwise, clients would retry for minutes."""
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
        hint="`aws account list-regions` lists this account's regions; if this is a new one, check "
        "the network connection",
    )


def _has_endpoint(session: boto3.session.Session, region: str) -> bool:
    """Return whether EC2's endpoint in a region resolves; true behind a proxy, which resolves it."""
    url = session.client("ec2", region_name=region).meta.endpoint_url
    if get_environ_proxies(url):
        return True
    try:
        return bool(socket.getaddrinfo(urllib.parse.urlsplit(url).hostname, None))
    except socket.gaierror:
        return False


def find_caller_cidr() -> str:
    """Return this machine's public IPv4 address, as AWS sees it, as a /32 range.

    Asks without a proxy, because SSH does not use it.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(_ADDRESS_SERVICE, timeout=10) as answer:
            address = ipaddress.IPv4Address(answer.read(64).decode().strip())
    except (urllib.error.URLError, OSError, ValueError) as error:
        behind = get_environ_proxies(_ADDRESS_SERVICE)
        raise CloudError(
            f"cannot determine this machine's public address from {_ADDRESS_SERVICE}"
            f"{' without its proxy, which SSH does not use' if behind else ''}: {error}",
            hint="specify the addresses that may use SSH: --ssh-cidr 203.0.113.7/32"
            + ("; if this network allows SSH only to a jump host: --jump" if behind else ""),
        ) from None
    return f"{address}/32"


def probe_ssh(region: str) -> str:
    """Explain why this machine's network blocks outgoing SSH; "" if it does not.

    Opens a connection to up to two of AWS's SSH servers and sends nothing. Ignores names that do not resolve.
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


# The AWS CLI's cache: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-role.html#cli-configure-role-cache
_CACHE = "~/.aws/cli/cache"
# Time from a purchase to installed nodes. botocore cannot refresh an MFA session in between.
_FOR_PURCHASE = timedelta(minutes=50)


class _RoleCache(JSONFileCache):
    """The AWS CLI's credential cache, which may be read-only; hides credentials that expire too soon."""

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
    """Return a session from the AWS configuration, in the given region, else the configured one.

    Shares the temporary credentials of roles with the AWS CLI, so that a role with MFA prompts about
    once an hour instead of in every command. With ``buys``, it also prompts if the credentials could
    expire during the purchase. Raises :class:`UsageError` for an unusable configuration.
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
        session.get_credentials()
    except BotoCoreError as error:
        raise explain_credentials(error) or UsageError(
            f"AWS configuration can't be used: {error}"
        ) from None
    # botocore does not check whether a credential_process exists, nor the type of what it prints.
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot use the AWS credentials: {error}", hint=_PROCESS_HINT) from None
    return session


def describe_end(session: boto3.session.Session | None) -> str:
    """Return when credentials end that only the user can renew, as text; "" for others."""
    credentials: Any = session.get_credentials() if session else None
    if session is None or not isinstance(credentials, RefreshableCredentials):
        return "at a time that they do not say" if credentials and credentials.token else ""
    # botocore renews all others by itself.
    expires = vars(credentials)["_expiry_time"]
    is_asked = expires and session._session.get_scoped_config().get("mfa_serial")
    return f"at {spoken_time(expires, datetime.now(timezone.utc))}" if is_asked else ""


def find_profile(session: boto3.session.Session | None) -> str:
    """Return the AWS profile of the credentials; "" if they come from another source."""
    credentials = session.get_credentials() if session else None
    if session is None or credentials is None or credentials.method == "env":
        return ""
    name = session.profile_name
    return name if name in session.available_profiles else ""


NO_CREDENTIALS = "no AWS credentials found"
CREDENTIALS_HINT = (
    "run `aws configure`, `aws login`, or `aws sso login`, or set AWS_PROFILE; "
    "to try the tool without an account: --cloud local"
)
_SSO = (boto.SSOError, boto.TokenRetrievalError)
_PROCESS_HINT = (
    "run the profile's credential_process yourself: it must print the JSON that "
    "https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html describes"
)
_NO_MFA_CODE = (
    "AWS accepts an MFA code only once: wait for the next one, then run the same command again"
)


class CredentialsError(UsageError):
    """The AWS credentials are missing, invalid, or have expired."""


class MissingCredentialsError(CredentialsError):
    """This machine has no AWS credentials at all."""


def _profile() -> str:
    """Return ``--profile`` for an AWS CLI command. Like botocore, prefer AWS_DEFAULT_PROFILE."""
    name = os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")
    return f" --profile {shlex.quote(name)}" if name else ""


_UNUSABLE = "cannot use the AWS credentials: {error}"
# botocore's errors; what failed, and the hint.
_EXPLAINED: tuple[tuple[Any, str, str], ...] = (
    (boto.PartialCredentialsError, "incomplete AWS credentials: {error}", "aws configure{profile}"),
    (
        boto.ProfileNotFound,
        "AWS configuration can't be used: {error}",
        "`aws configure list-profiles` lists profiles, `aws configure{profile}` creates this one",
    ),
    (_SSO, "the SSO session has expired: {error}", "aws sso login{profile}"),
    (
        boto.LoginInsufficientPermissions,
        _UNUSABLE,
        "ask an administrator for the policy SignInLocalDevelopmentAccess",
    ),
    (boto.LoginError, "the AWS login has expired: {error}", "aws login{profile}"),
    (
        boto.RefreshWithMFAUnsupportedError,
        "the session of the role with MFA has expired",
        "run the same command again to enter a new code; set duration_seconds in the profile for longer "
        "sessions",
    ),
    (boto.MissingDependencyException, _UNUSABLE, "uv pip install 'boto3[crt]'"),
    (
        (boto.InvalidConfigError, boto.ConfigParseError),
        _UNUSABLE,
        "correct the profile in ~/.aws/config or ~/.aws/credentials, or set AWS_PROFILE",
    ),
)


def explain_credentials(error: BaseException) -> CredentialsError | None:
    """Translate an error in AWS configuration or credentials; return ``None`` for other errors."""
    if isinstance(error, boto.NoCredentialsError):
        return MissingCredentialsError(NO_CREDENTIALS, hint=CREDENTIALS_HINT)
    for kinds, message, hint in _EXPLAINED:
        if isinstance(error, kinds):
            hint = hint.format(profile=_profile())
            return CredentialsError(message.format(error=error), hint=hint)
    # botocore has no class for this error.
    if isinstance(error, RuntimeError) and "refreshed credentials are still expired" in str(error):
        return CredentialsError(
            "the AWS credentials have expired, and their source still returns the expired ones",
            hint=f"renew them, or {FIX_CLOCK}",
        )
    if isinstance(error, boto.CredentialRetrievalError):
        is_process = error.kwargs.get("provider") == "custom-process"
        hint = _PROCESS_HINT if is_process else CREDENTIALS_HINT
        return CredentialsError(_UNUSABLE.format(error=" ".join(str(error).split())), hint=hint)
    return None


def explain_role(operation: str, detail: str) -> UsageError | None:
    """Explain why a profile's role can't be assumed; return ``None`` for other operations."""
    if not operation.startswith("AssumeRole"):
        return None
    hint = (
        "check that these credentials may assume the role: `aws sts get-caller-identity` shows them"
    )
    return UsageError(
        f"the profile's role can't be assumed: {detail}",
        hint=_NO_MFA_CODE if "MultiFactorAuthentication" in detail else hint,
    )
