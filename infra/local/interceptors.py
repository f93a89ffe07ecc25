"""Signatures, permissions, and throttling: calls that are refused before they reach EC2."""

from __future__ import annotations

from typing import Any

from moto.core.exceptions import AccessDeniedError
from moto.iam.access_control import IAMRequest
from moto.iam.models import AccessKey, iam_backends
from werkzeug.datastructures import EnvironHeaders

from infra.local.faults import ActiveFaults
from infra.local.requests import ApiCall, Reply, error_reply
from infra.local.signatures import refuse_stranger

_USER = "spr-cluster"
# EC2's codes differ from those of all other services:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#CommonErrors
_DENIED = {"ec2": "UnauthorizedOperation", "sts": "AccessDenied", "iam": "AccessDenied"}
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
        if self._faults.policy is not None and (denied := self._deny(environ, call)):
            return denied
        if self._faults.is_throttled(call.action):
            code, status = _THROTTLED.get(call.service, ("ThrottlingException", 400))
            return error_reply(call, status, code, "Request limit exceeded.")
        return None

    def _deny(self, environ: dict[str, Any], call: ApiCall) -> Reply | None:
        """Evaluate the tool's policy with moto, which knows neither resources nor conditions."""
        self._put_policy(str(self._faults.policy))
        query = environ.get("QUERY_STRING", "")
        try:
            request = IAMRequest(
                account_id=self._account,
                method=environ["REQUEST_METHOD"],
                path=environ.get("PATH_INFO", "/") + (f"?{query}" if query else ""),
                data={},
                body=call.body,
                headers=EnvironHeaders(environ),
                action=call.action,
            )
            request.check_action_permitted("*")
        except AccessDeniedError as error:
            code = _DENIED.get(call.service, "AccessDeniedException")
            return error_reply(call, 403, code, error.message)
        return None

    def _put_policy(self, policy: str) -> None:
        """Give the tool's user exactly this policy."""
        iam = iam_backends[self._account]["aws"]
        if _USER not in iam.users:
            user = iam.create_user("us-east-1", _USER)
            key = AccessKey(_USER, "AKIA", self._account)
            key.access_key_id, key.secret_access_key = self._credentials
            user.access_keys.append(key)
        iam.users[_USER].policies = {"policy": policy}
