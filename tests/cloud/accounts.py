"""Accounts and callers of the embedded cloud, and its STS."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from infra.ec2.tags import render_time
from infra.local.api.requests import ApiCall, Reply, error_reply
from tests.cloud.faults import ActiveFaults

ACCOUNT = "123456789012"
_XMLNS = "https://sts.amazonaws.com/doc/2011-06-15/"


class Accounts:
    """Serves STS. A call's caller comes from the faults file or from an assumed role's session."""

    def __init__(self, faults: ActiveFaults, credentials: tuple[str, str]) -> None:
        self._faults = faults
        self._credentials = credentials
        self._sessions: dict[str, str] = {}
        self._used_codes: set[tuple[str, str]] = set()

    def caller_of(self, environ: dict[str, Any]) -> str:
        """Return the ARN of a call's caller, and make moto act in its account."""
        faults = self._faults.now
        service = "sts" if faults.caller.startswith("assumed-role/") else "iam"
        default = f"arn:aws:{service}::{faults.account or ACCOUNT}:{faults.caller}"
        arn = self._sessions.get(environ.get("HTTP_X_AMZ_SECURITY_TOKEN", ""), default)
        environ["HTTP_X_MOTO_ACCOUNT_ID"] = account_of(arn)
        return arn

    def answer(self, call: ApiCall, caller: str) -> Reply | None:
        """Answer an STS call about the caller; return ``None`` for calls that moto answers."""
        if call.service != "sts":
            return None
        if call.action == "GetCallerIdentity":
            return _reply(
                call.action, {"Arn": caller, "UserId": "AIDA", "Account": account_of(caller)}
            )
        return self._assume_role(call) if call.action == "AssumeRole" else None

    def _assume_role(self, call: ApiCall) -> Reply:
        """Return temporary credentials. As on AWS, an MFA code is valid only once.

        https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html
        """
        values = {key: value[0] for key, value in parse_qs(call.body.decode()).items()}
        code = (values.get("SerialNumber", ""), values.get("TokenCode", ""))
        if code in self._used_codes:
            text = "MultiFactorAuthentication failed with invalid MFA one time pass code."
            return error_reply(call, 403, "AccessDenied", text)
        if code[1]:
            self._used_codes.add(code)
        token = secrets.token_hex(16)
        role, session = values["RoleArn"], values["RoleSessionName"]
        path = f"assumed-role/{role.rpartition('/')[2]}/{session}"
        self._sessions[token] = f"arn:aws:sts::{account_of(role)}:{path}"
        lifetime = timedelta(seconds=int(values.get("DurationSeconds", 3600)))
        key, secret = self._credentials
        credentials = {
            "AccessKeyId": key,
            "SecretAccessKey": secret,
            "SessionToken": token,
            "Expiration": render_time(datetime.now(timezone.utc) + lifetime),
        }
        return _reply(call.action, {"Credentials": credentials})


def account_of(arn: str) -> str:
    """Return the account in an ARN."""
    return arn.split(":")[4]


def _reply(action: str, result: dict[str, Any]) -> Reply:
    body = f'<{action}Response xmlns="{_XMLNS}"><{action}Result>{_render(result)}</{action}Result>'
    content = f"{body}</{action}Response>".encode()
    headers = (("Content-Type", "text/xml"), ("Content-Length", str(len(content))))
    return Reply("200 OK", headers, content)


def _render(values: dict[str, Any]) -> str:
    return "".join(
        f"<{key}>{_render(value) if isinstance(value, dict) else escape(value)}</{key}>"
        for key, value in values.items()
    )
