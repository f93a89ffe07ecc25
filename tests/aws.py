"""EC2's calls in this process: recorded, and answered without HTTP."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.httpsession import URLLib3Session
from werkzeug.test import create_environ

from infra.aws.clients import Clients


@dataclass
class Recorder:
    """The EC2 calls of a test, in their order, as ``(operation, parameters)``."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @contextmanager
    def watching(self, clients: Clients) -> Iterator[None]:
        """Record what these clients send to EC2; a retried request counts once."""
        all_events: list[Any] = [client.meta.events for client in (clients.ec2, clients.buyer)]
        for events in all_events:
            events.register("provide-client-params.ec2.*", self._record)
        try:
            yield
        finally:
            for events in all_events:
                events.unregister("provide-client-params.ec2.*", self._record)

    def _record(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.calls.append((model.name, params))

    def operations(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of(self, operation: str) -> list[dict[str, Any]]:
        return [params for name, params in self.calls if name == operation]


def tags_of(params: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The tags of a creating request, by the kind of resource."""
    return {
        spec["ResourceType"]: {tag["Key"]: tag["Value"] for tag in spec["Tags"]}
        for spec in params["TagSpecifications"]
    }


class _Body(io.BytesIO):
    """A response's body as botocore reads it."""

    def stream(self) -> Iterator[bytes]:
        yield self.read()


@contextmanager
def answered_directly(url: str, application: Any) -> Iterator[None]:
    """Let a WSGI application answer calls to its address without HTTP, in a third of the time.

    Calls that are not to ``/``, as to S3, are still sent.
    """
    send = URLLib3Session.send

    def answer(session: Any, request: Any) -> AWSResponse:
        if request.url != f"{url}/" or request.method != "POST":
            return send(session, request)
        headers = {key: _text(value) for key, value in request.headers.items()}
        environ = create_environ(
            method=request.method, base_url=request.url, headers=headers, data=request.body
        )
        begun: list[Any] = []
        body = b"".join(application(environ, lambda *answered: begun.extend(answered)))
        status, answered = begun
        return AWSResponse(
            request.url, int(status.split()[0]), HTTPHeaders.from_pairs(answered), _Body(body)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(URLLib3Session, "send", answer)
        yield


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
