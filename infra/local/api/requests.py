"""API calls, parsed before moto sees them, and error responses."""

from __future__ import annotations

import functools
import io
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, parse_qsl
from xml.sax.saxutils import escape

import botocore.session

from infra.errors import SprError

_SCOPE = re.compile(r"Credential=[^/]+/\d+/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request")
READS = ("Describe", "Get", "List")
_REQUEST_ID = "59dbff89-35bd-4eac-99ed-be587ex0"


@dataclass(frozen=True)
class ApiCall:
    """An API call; ``service`` is its name in signatures, such as ``ec2`` or ``servicequotas``."""

    service: str
    region: str
    action: str
    body: bytes
    path: str = ""

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of an EC2 or IAM call as sent: flat, with numbered lists."""
        return dict(parse_qsl(self.body.decode("utf-8", "replace"), keep_blank_values=True))


@dataclass(frozen=True)
class Reply:
    """A complete HTTP response."""

    status: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def read_call(environ: dict[str, Any]) -> ApiCall:
    """Parse the API call of a request and leave its body readable for moto."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(length)
    environ["wsgi.input"] = io.BytesIO(body)
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    service, region = (scope["service"], scope["region"]) if scope else ("", "")
    if target := environ.get("HTTP_X_AMZ_TARGET", ""):
        return ApiCall(service, region, str(target).rsplit(".", 1)[-1], body)
    if service == "scheduler":
        path = str(environ.get("PATH_INFO", ""))
        return ApiCall(service, region, _rest_action(environ), body, path)
    values = parse_qs(body.decode("utf-8", "replace")) or parse_qs(environ.get("QUERY_STRING", ""))
    return ApiCall(service, region, str(values.get("Action", [""])[0]), body)


def _rest_action(environ: dict[str, Any]) -> str:
    """Return EventBridge Scheduler's action for a method and path; "" if there is none."""
    method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
    found = (name for verb, uri, name in _rest_actions() if verb == method and uri.fullmatch(path))
    return next(found, "")


@functools.cache
def _rest_actions() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    model = botocore.session.get_session().get_service_model("scheduler")
    https = {name: model.operation_model(name).http for name in model.operation_names}
    return tuple(
        (http["method"], re.compile(re.sub(r"\{.*?\}", ".+", http["requestUri"])), name)
        for name, http in https.items()
    )


def reason_of(error: OSError | SprError) -> str:
    """Return an error's message without its hint, or what the system says of a file."""
    return error.message if isinstance(error, SprError) else error.strerror or str(error)


def error_reply(call: ApiCall, status: int, code: str, message: str) -> Reply:
    """Return an error in the service's format: EC2's XML, IAM's and STS's XML, or JSON."""
    if call.service == "ec2":
        # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#api-error-response
        text = (
            f"<Response><Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}"
            f"</Message></Error></Errors><RequestID>{_REQUEST_ID}</RequestID></Response>"
        )
    elif call.service in ("iam", "sts"):
        text = (
            f"<ErrorResponse><Error><Type>Sender</Type><Code>{escape(code)}</Code><Message>"
            f"{escape(message)}</Message></Error><RequestId>{_REQUEST_ID}</RequestId></ErrorResponse>"
        )
    else:
        return json_reply({"__type": code, "message": message}, f"{status} {code}")
    return _reply(f"{status} {code}", "text/xml;charset=UTF-8", text)


def json_reply(content: Any, status: str = "200 OK") -> Reply:
    """Return a JSON document as a response."""
    return _reply(status, "application/x-amz-json-1.1", json.dumps(content))


def _reply(status: str, kind: str, text: str) -> Reply:
    body = text.encode()
    return Reply(status, (("Content-Type", kind), ("Content-Length", str(len(body)))), body)
