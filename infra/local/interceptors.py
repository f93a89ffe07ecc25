"""What stands before EC2: permissions, throttling, and calls that fail for no reason of their own."""

from __future__ import annotations

from typing import Any

from werkzeug.datastructures import EnvironHeaders

from infra.local.faults_in_force import FaultsInForce
from infra.local.requests import ApiCall, Reply, error_reply

_USER = "spr-cluster"
# EC2 says it differently from everything else:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#CommonErrors
_DENIED = {"ec2": "UnauthorizedOperation", "sts": "AccessDenied"}
_THROTTLED = {"ec2": ("RequestLimitExceeded", 503)}


class Gate:
    """Decides about a call before it reaches EC2; ``credentials`` are the tool's own."""

    def __init__(self, faults: FaultsInForce, account: str, credentials: tuple[str, str]) -> None:
        self._faults = faults
        self._account = account
        self._credentials = credentials

    def refuse(self, environ: dict[str, Any], call: ApiCall) -> Reply | None:
        """The refusal of a call that may not pass, or is one too many."""
        if self._faults.policy is not None and (denied := self._deny(environ, call)):
            return denied
        if self._faults.is_throttled(call.action):
            code, status = _THROTTLED.get(call.service, ("ThrottlingException", 400))
            return error_reply(call, status, code, "Request limit exceeded.")
        return None

    def _deny(self, environ: dict[str, Any], call: ApiCall) -> Reply | None:
        """moto's own judgement of the caller's policy; it knows neither resources nor conditions."""
        from moto.core.exceptions import AccessDeniedError
        from moto.iam.access_control import IAMRequest
        from werkzeug.exceptions import HTTPException

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
            request.check_signature()
            request.check_action_permitted("*")
        except AccessDeniedError as error:
            code = _DENIED.get(call.service, "AccessDeniedException")
            return error_reply(call, 403, code, error.message)
        except HTTPException as error:
            code = str(getattr(error, "error_type", error.name))
            return error_reply(call, error.code or 403, code, "The credentials are not valid.")
        return None

    def _put_policy(self, policy: str) -> None:
        """Give the tool's user exactly this policy."""
        from moto.iam.models import AccessKey, iam_backends

        iam = iam_backends[self._account]["aws"]
        if _USER not in iam.users:
            user = iam.create_user("us-east-1", _USER)
            key = AccessKey(_USER, "AKIA", self._account)
            key.access_key_id, key.secret_access_key = self._credentials
            user.access_keys.append(key)
        iam.users[_USER].policies = {"policy": policy}
