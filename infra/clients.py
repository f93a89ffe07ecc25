"""boto3 clients, made once per command and passed on, and the one translation of their errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.parsers import ResponseParserError

from infra.cloud import Cloud
from infra.errors import CloudError, DeadlineError, SprError, UsageError
from infra.wait import wait_until

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_service_quotas import ServiceQuotasClient
    from types_boto3_ssm import SSMClient


T = TypeVar("T")

# What was just created is known everywhere within seconds.
_VISIBLE_DEADLINE_S = 30.0
_ATTEMPTS = 12
_LOST = (
    boto.EndpointConnectionError,
    boto.ConnectTimeoutError,
    boto.ReadTimeoutError,
    boto.ConnectionClosedError,
    ResponseParserError,
)
_BUSY = {
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "InternalError",
    "InternalFailure",
    "ServiceUnavailable",
    "Unavailable",
}
_CREDENTIALS_HINT = (
    "run `aws configure` or `aws sso login`, or set AWS_PROFILE; "
    "or try everything without an account: --cloud local"
)


@dataclass(frozen=True)
class Clients:
    """The services that the tool speaks with."""

    ec2: EC2Client
    buyer: EC2Client
    """EC2 without the SDK's own retries: what a refused purchase means is decided by us."""
    quotas: ServiceQuotasClient
    ssm: SSMClient


def connect(cloud: Cloud) -> Clients:
    """Clients for a cloud; nothing is sent yet."""
    key, secret = cloud.credentials or (None, None)
    session = boto3.session.Session(
        aws_access_key_id=key, aws_secret_access_key=secret, region_name=cloud.region
    )
    config = Config(
        # Throttling is answered with adaptive back-off and jitter, here and nowhere else.
        retries={"mode": "adaptive", "total_max_attempts": _ATTEMPTS},
        connect_timeout=10,
        read_timeout=70,
        user_agent_extra="spr-cluster",
        # Between this machine and an endpoint of its own stands no proxy.
        proxies={} if cloud.endpoint_url else None,
    )
    once = config.merge(Config(retries={"mode": "standard", "total_max_attempts": 1}))
    url = cloud.endpoint_url
    return Clients(
        ec2=session.client("ec2", endpoint_url=url, config=config),
        buyer=session.client("ec2", endpoint_url=url, config=once),
        quotas=session.client("service-quotas", endpoint_url=url, config=config),
        ssm=session.client("ssm", endpoint_url=url, config=config),
    )


def when_visible(call: Callable[..., T], **parameters: Any) -> T:
    """Make a call that names what was made seconds ago, waiting until EC2 knows of it everywhere.

    EC2 is eventually consistent:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/query-api-troubleshooting.html#eventual-consistency
    """

    def attempt() -> tuple[T] | None:
        try:
            return (call(**parameters),)
        except boto.ClientError as error:
            if not error_code(error).endswith(".NotFound"):
                raise
            failure.append(error)
            return None

    failure: list[boto.ClientError] = []
    try:
        return wait_until("", attempt, deadline_s=_VISIBLE_DEADLINE_S, every_s=3)[0]
    except DeadlineError:
        raise failure[-1] from None


def is_passing(error: Exception) -> bool:
    """AWS can't be reached or is busy: the same request may well pass in a while."""
    if isinstance(error, boto.ClientError):
        code = error_code(error)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        # EC2 answers a lack of machines with a server error, too.
        return code in _BUSY or (status >= 500 and not code.startswith("Insufficient"))
    return isinstance(error, _LOST)


def patient(probe: Callable[[], T | None]) -> Callable[[], T | None]:
    """A probe that takes a broken connection or a busy EC2 as "not yet".

    A laptop that changes its network must not end a wait of forty minutes.
    """

    def attempt() -> T | None:
        try:
            return probe()
        except (boto.ClientError, boto.BotoCoreError) as error:
            if not is_passing(error):
                raise
            return None

    return attempt


def error_code(error: boto.ClientError) -> str:
    """EC2's name for what went wrong, such as ``InvalidGroup.NotFound``."""
    return str(error.response.get("Error", {}).get("Code", ""))


DENIED = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}
_EXPIRED = {
    "ExpiredToken",
    "RequestExpired",
    "AuthFailure",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_UNUSABLE_CREDENTIALS = (
    boto.ProfileNotFound,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
)
_BUSY_HINT = (
    "EC2 is busy, or limits the account's calls: run the same command again in some minutes"
)
_CODES = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html"
_SUPPORT = "only AWS's support can change that: https://console.aws.amazon.com/support"
_HINTS = {
    "OptInRequired": "enable the region for the account in the console (Account, AWS Regions), or "
    "finish the account's registration",
    "Blocked": _SUPPORT,
    "PendingVerification": f"it takes some minutes, at most four hours; after that {_SUPPORT}",
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": "spot needs a role that every account makes "
    "once: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
}


def translate_boto_error(error: Exception) -> SprError | None:
    """botocore's error as one clear line for the user; ``None`` for any other error."""
    if isinstance(error, boto.ClientError):
        return _translate_client_error(error)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return UsageError("no AWS credentials found", hint=_CREDENTIALS_HINT)
    if isinstance(error, _UNUSABLE_CREDENTIALS):
        return UsageError(f"AWS credentials can't be used: {error}", hint=_CREDENTIALS_HINT)
    if isinstance(error, ResponseParserError):
        return CloudError(
            "what came back is not from AWS",
            hint="is a proxy or a network's login page between this machine and AWS?",
        )
    if isinstance(error, boto.BotoCoreError):
        return CloudError(f"AWS can't be reached: {error}", hint="check the network and --region")
    return None


def _translate_client_error(error: boto.ClientError) -> SprError:
    code = error_code(error)
    operation = error.operation_name
    # EC2 appends an encoded message of a thousand characters that only an administrator can decode.
    detail = re.sub(
        r"\s*Encoded authorization failure message:.*",
        "",
        str(error.response.get("Error", {}).get("Message", error)),
        flags=re.DOTALL,
    )
    if code in DENIED or code.startswith("UnauthorizedOperation"):
        return CloudError(
            f"no permission for {operation}: {detail}",
            code=code,
            hint=f"have an administrator allow {operation} (`spr-cluster iam-policy` prints all that "
            "is needed), or choose another AWS_PROFILE",
        )
    if code in _EXPIRED:
        return UsageError(f"AWS does not accept the credentials: {detail}", hint=_CREDENTIALS_HINT)
    hint = _BUSY_HINT if is_passing(error) else _HINTS.get(code, f"what the codes mean: {_CODES}")
    return CloudError(f"{operation} failed: {code}: {detail}", code=code, hint=hint)
