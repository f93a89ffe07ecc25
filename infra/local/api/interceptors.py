"""Rejection of calls before they reach EC2: unsigned, not permitted, or throttled.

Any local user can connect to the port, and root starts the containers, so callers must prove that they
know this cloud's secret.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
import time
from calendar import timegm
from dataclasses import asdict, replace
from typing import Any

from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from werkzeug.datastructures import EnvironHeaders

from infra.local.api.authorization import parameters_of, requests_of
from infra.local.api.refusals import require_profile
from infra.local.api.requests import ApiCall, Reply, error_reply
from infra.local.faults import ActiveFaults
from infra.local.policy import Request

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


_USER = "spr-cluster"
# EC2's codes differ from those of all other services:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#CommonErrors
_DENIED = {"ec2": "UnauthorizedOperation", "sts": "AccessDenied", "iam": "AccessDenied"}
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonParameters.html
_DRY_RUN = "Request would have succeeded, but DryRun flag is set."
_THROTTLED = {"ec2": ("RequestLimitExceeded", 503)}


class Interceptor:
    """Rejects calls by signature, policy, and rate; ``credentials`` are the tool's."""

    def __init__(self, faults: ActiveFaults, account: str, credentials: tuple[str, str]) -> None:
        self._faults = faults
        self._account = account
        self._credentials = credentials

    def refuse(self, environ: dict[str, Any], call: ApiCall) -> Reply | None:
        """Return the error response for a call that is unsigned, denied, a dry run, or throttled."""
        if stranger := refuse_stranger(environ, call, self._credentials):
            return stranger
        if call.action == "SimulatePrincipalPolicy":
            return error_reply(call, 403, "AccessDenied", "The embedded cloud has no simulator.")
        if self._faults.policy is not None and (denied := self._deny(call)):
            return denied
        if call.service == "ec2" and (given := parameters_of(call)).get("DryRun") == "true":
            try:
                # EC2 validates parameters first. Of these, only the profile is not made by `up` just before.
                if profile := given.get("IamInstanceProfile.Name"):
                    require_profile(ec2_backends[self._account][call.region], profile)
            except EC2ClientError as error:
                return error_reply(call, 400, error.code, error.message)
            return error_reply(call, 412, "DryRunOperation", _DRY_RUN)
        if self._faults.is_throttled(call.action):
            code, status = _THROTTLED.get(call.service, ("ThrottlingException", 400))
            return error_reply(call, status, code, "Request limit exceeded.")
        return None

    def _deny(self, call: ApiCall) -> Reply | None:
        """Return an error unless the policy allows all requests of a call."""
        # AWS allows this call to every caller, regardless of policies.
        if call.action == "GetCallerIdentity":
            return None
        ec2 = ec2_backends[self._account][call.region]
        for request in requests_of(call, ec2, self._faults.tag_delay_s):
            if not self._faults.allows(request):
                code = _DENIED.get(call.service, "AccessDeniedException")
                return error_reply(call, 403, code, self._explain(call, request))
        return None

    def _explain(self, call: ApiCall, request: Request) -> str:
        """Explain a denial as AWS does.

        https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot_access-denied.html
        """
        user = f"arn:aws:iam::{self._account}:user/{_USER}"
        why = (
            f"User: {user} is not authorized to perform: {request.action} on resource: "
            f"{request.resource} because no identity-based policy allows the {request.action} action"
        )
        if call.service != "ec2":
            return why
        encoded = base64.b64encode(json.dumps(asdict(request)).encode()).decode()
        return (
            f"You are not authorized to perform this operation. {why}. "
            f"Encoded authorization failure message: {encoded}"
        )
