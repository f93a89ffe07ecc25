"""boto3 clients, made once per command and passed on, and the one translation of their errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from infra.errors import CloudError, SprError, UsageError

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ssm import SSMClient
    from types_boto3_sts import STSClient

    from infra.cloud import Cloud

# Throttling is answered with adaptive back-off here and nowhere else.
_CONFIG = Config(
    retries={"mode": "adaptive", "max_attempts": 8},
    connect_timeout=10,
    read_timeout=70,
    user_agent_extra="spr-cluster",
)
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
    url = cloud.endpoint_url
    return Clients(
        ec2=session.client("ec2", endpoint_url=url, config=_CONFIG),
        ssm=session.client("ssm", endpoint_url=url, config=_CONFIG),
        sts=session.client("sts", endpoint_url=url, config=_CONFIG),
    )


def error_code(error: boto.ClientError) -> str:
    """EC2's name for what went wrong, such as ``InvalidGroup.NotFound``."""
    return str(error.response.get("Error", {}).get("Code", ""))


_DENIED = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}
_EXPIRED = {"ExpiredToken", "RequestExpired", "AuthFailure", "InvalidClientTokenId"}


def translate_boto_error(error: Exception) -> SprError | None:
    """botocore's error as one clear line for the user; ``None`` for any other error."""
    if isinstance(error, boto.ClientError):
        return _translate_client_error(error)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return UsageError("no AWS credentials found", hint=_CREDENTIALS_HINT)
    if isinstance(error, boto.ProfileNotFound | boto.TokenRetrievalError | boto.SSOError):
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
    return CloudError(f"{operation} failed: {code}: {detail}", code=code)
