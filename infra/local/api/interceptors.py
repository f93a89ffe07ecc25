"""Rejection of calls that are not signed, and answers to dry runs.

Any local user can connect to the port, and root starts the containers, so callers must prove that they
know this cloud's secret.
"""

from __future__ import annotations

import hmac
import re
import time
from calendar import timegm
from dataclasses import replace
from typing import Any

from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from werkzeug.datastructures import EnvironHeaders

from infra.local.api.requests import ApiCall, Reply, error_reply

# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/\d{8}/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request, "
    r"SignedHeaders=(?P<headers>[^,]+), Signature=(?P<signature>[0-9a-f]{64})"
)
_MOST_OFF_S = 5 * 60
# EC2's codes differ from those of all other services:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#CommonErrors
_STRANGER = {"ec2": ("AuthFailure", 401), "sts": ("InvalidClientTokenId", 403)}
_OFF = {"ec2": ("RequestExpired", 400), "sts": ("SignatureDoesNotMatch", 403)}


def refuse_stranger(
    environ: dict[str, Any], call: ApiCall, credentials: tuple[str, str]
) -> Reply | None:
    """Return an error if a call is not signed with these credentials, or if its date is off."""
    # Only the signature names the service, so default to EC2.
    call = replace(call, service=call.service or "ec2")
    if not _is_signed(environ, call.body, credentials):
        code, status = _STRANGER.get(call.service, ("UnrecognizedClientException", 400))
        text = "AWS was not able to validate the provided access credentials"
        return error_reply(call, status, code, text)
    if call.region not in ec2_backends[DEFAULT_ACCOUNT_ID]:
        # AWS's error for a region that is not enabled; moto would fail without a proper error response.
        other = _OFF.get(call.service, ("InvalidSignatureException", 400))
        code, status = _STRANGER["ec2"] if call.service == "ec2" else other
        return error_reply(call, status, code, "Credential should be scoped to a valid region.")
    stamp = environ["HTTP_X_AMZ_DATE"]
    if abs(time.time() - timegm(time.strptime(stamp, SIGV4_TIMESTAMP))) > _MOST_OFF_S:
        code, status = _OFF.get(call.service, ("InvalidSignatureException", 400))
        text = f"The request's date, {stamp}, is more than {_MOST_OFF_S // 60} minutes off"
        return error_reply(call, status, code, text)
    return None


def _is_signed(
    environ: dict[str, Any],
    body: bytes,
    credentials: tuple[str, str],
    method: type[SigV4Auth] = SigV4Auth,
) -> bool:
    found = _AUTHORIZATION.fullmatch(environ.get("HTTP_AUTHORIZATION", ""))
    if not found or found["key"] != credentials[0] or "HTTP_X_AMZ_DATE" not in environ:
        return False
    signed = found["headers"].split(";")
    request = AWSRequest(
        method=environ["REQUEST_METHOD"],
        # The URI as sent, because an ARN in a path has encoded slashes.
        url=environ["REQUEST_URI"],
        data=body,
        headers={key: value for key, value in EnvironHeaders(environ) if key.lower() in signed},
    )
    request.context["timestamp"] = environ["HTTP_X_AMZ_DATE"]
    auth = method(Credentials(*credentials), found["service"], found["region"])
    text = auth.string_to_sign(request, auth.canonical_request(request))
    return hmac.compare_digest(auth.signature(text, request), found["signature"])


def is_signed_s3(environ: dict[str, Any], credentials: tuple[str, str]) -> bool:
    """Return whether a request to S3 is signed with these credentials, within the last minutes."""
    stamp = environ.get("HTTP_X_AMZ_DATE", "")
    try:
        sent = timegm(time.strptime(stamp, SIGV4_TIMESTAMP))
    except ValueError:
        return False
    is_recent = abs(time.time() - sent) <= _MOST_OFF_S
    return is_recent and _is_signed(environ, b"", credentials, S3SigV4Auth)


# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonParameters.html
_DRY_RUN = "Request would have succeeded, but DryRun flag is set."


def answer_dry_run(call: ApiCall, ec2: Any) -> Reply | None:
    """Answer a dry run; return ``None`` for other calls."""
    given = call.parameters if call.service == "ec2" else {}
    if given.get("DryRun") != "true":
        return None
    try:
        # EC2 validates parameters first. Of these, only the profile is not made by `up` just before.
        if profile := given.get("IamInstanceProfile.Name"):
            ec2.require_profile(profile)
    except EC2ClientError as error:
        return error_reply(call, 400, error.code, error.message)
    return error_reply(call, 412, "DryRunOperation", _DRY_RUN)
