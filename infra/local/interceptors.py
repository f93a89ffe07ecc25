"""Signatures, permissions, and throttling: calls that are refused before they reach EC2."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import Any

from moto.ec2.models import ec2_backends

from infra.local.authorization import parameters_of, requests_of
from infra.local.faults import ActiveFaults
from infra.local.policy import Request
from infra.local.requests import ApiCall, Reply, error_reply
from infra.local.signatures import refuse_stranger

_USER = "spr-cluster"
# EC2's codes differ from those of all other services:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#CommonErrors
_DENIED = {"ec2": "UnauthorizedOperation", "sts": "AccessDenied", "iam": "AccessDenied"}
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonParameters.html
_DRY_RUN = "Request would have succeeded, but DryRun flag is set."
_THROTTLED = {"ec2": ("RequestLimitExceeded", 503)}


class Interceptor:
    """Refuses calls by signature, policy, and rate; ``credentials`` are the tool's."""

    def __init__(self, faults: ActiveFaults, account: str, credentials: tuple[str, str]) -> None:
        self._faults = faults
        self._account = account
        self._credentials = credentials

    def refuse(self, environ: dict[str, Any], call: ApiCall) -> Reply | None:
        """Return the refusal of a call that is a stranger's, denied, or throttled."""
        if stranger := refuse_stranger(environ, call, self._credentials):
            return stranger
        if call.action == "SimulatePrincipalPolicy":
            return error_reply(call, 403, "AccessDenied", "The embedded cloud has no simulator.")
        if self._faults.policy is not None and (denied := self._deny(call)):
            return denied
        if call.service == "ec2" and parameters_of(call).get("DryRun") == "true":
            return error_reply(call, 412, "DryRunOperation", _DRY_RUN)
        if self._faults.is_throttled(call.action):
            code, status = _THROTTLED.get(call.service, ("ThrottlingException", 400))
            return error_reply(call, status, code, "Request limit exceeded.")
        return None

    def _deny(self, call: ApiCall) -> Reply | None:
        """Refuse a call if the policy does not allow all that it needs."""
        # AWS allows this call to every caller, whatever their policy.
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
