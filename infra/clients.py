"""boto3 clients, made once per command and passed on, and the one translation of their errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from infra.errors import CloudError, DeadlineError, SprError, UsageError
from infra.wait import wait_until

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ssm import SSMClient
    from types_boto3_sts import STSClient

    from infra.cloud import Cloud

T = TypeVar("T")

# What was just created is known everywhere within seconds.
_VISIBLE_DEADLINE_S = 20.0
_CREDENTIALS_HINT = (
    "run `aws configure` or `aws sso login`, or set AWS_PROFILE; "
    "or try everything without an account: --cloud local"
)


@dataclass(frozen=True)
class Clients:
    """The three services that the tool speaks with."""

    ec2: EC2Client
    ssm: SSMClient
    sts: STSClient


def connect(cloud: Cloud) -> Clients:
    """Clients for a cloud; nothing is sent yet."""
    key, secret = cloud.credentials or (None, None)
    session = boto3.session.Session(
        aws_access_key_id=key, aws_secret_access_key=secret, region_name=cloud.region
    )
    # Throttling is answered with adaptive back-off here and nowhere else.
    config = Config(
        retries={"mode": "adaptive", "max_attempts": 8},
        connect_timeout=10,
        read_timeout=70,
        user_agent_extra="spr-cluster",
        # Between this machine and an endpoint of its own stands no proxy.
        proxies={} if cloud.endpoint_url else None,
    )
    url = cloud.endpoint_url
    return Clients(
        ec2=session.client("ec2", endpoint_url=url, config=config),
        ssm=session.client("ssm", endpoint_url=url, config=config),
        sts=session.client("sts", endpoint_url=url, config=config),
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


def error_code(error: boto.ClientError) -> str:
    """EC2's name for what went wrong, such as ``InvalidGroup.NotFound``."""
    return str(error.response.get("Error", {}).get("Code", ""))


_DENIED = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}
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
_HINTS = {
    "VcpuLimitExceeded": "the quota counts vCPUs (on-demand standard: L-1216C47A); ask for more in "
    "the console's Service Quotas, or use fewer --nodes",
    "InsufficientInstanceCapacity": "this zone has no such machine free now: a subnet in another "
    "zone (--subnet-id), another --instance-type, or later",
}


def translate_boto_error(error: Exception) -> SprError | None:
    """botocore's error as one clear line for the user; ``None`` for any other error."""
    if isinstance(error, boto.ClientError):
        return _translate_client_error(error)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return UsageError("no AWS credentials found", hint=_CREDENTIALS_HINT)
    if isinstance(error, _UNUSABLE_CREDENTIALS):
        return UsageError(f"AWS credentials can't be used: {error}", hint=_CREDENTIALS_HINT)
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
    if code in _DENIED or code.startswith("UnauthorizedOperation"):
        return CloudError(
            f"no permission for {operation}: {detail}",
            code=code,
            hint=f"have an administrator allow {operation}, or choose another AWS_PROFILE",
        )
    if code in _EXPIRED:
        return UsageError(f"AWS does not accept the credentials: {detail}", hint=_CREDENTIALS_HINT)
    return CloudError(f"{operation} failed: {code}: {detail}", code=code, hint=_HINTS.get(code))
