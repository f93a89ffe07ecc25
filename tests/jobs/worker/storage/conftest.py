"""S3 by moto, behind a layer that counts, cuts, and falsifies what nodes' clients get."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


@dataclass
class Proxy:
    """The layer: a WSGI application."""

    app: Any
    url: str = ""
    requests: list[str] = field(default_factory=list)
    limit: Callable[[str], int | None] = lambda _: None
    """After how many bytes the content of an answer is cut; ``None``: never."""
    change: Callable[[str, bytes], bytes] = lambda _, content: content
    answer: Callable[[str], tuple[str, str] | None] = lambda _: None
    """Status and content instead of S3's."""

    @property
    def gets(self) -> list[str]:
        """The requests for objects, or parts of them."""
        return [each for each in self.requests if each.startswith("GET /data/")]

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        words = (environ.get(name) for name in ("REQUEST_METHOD", "RAW_URI", "HTTP_RANGE"))
        request = " ".join(filter(None, words))
        self.requests.append(request)
        if own := self.answer(request):
            start_response(own[0], [("Content-Length", str(len(own[1])))])
            return [own[1].encode()]
        content = self.change(request, b"".join(self.app(environ, start_response)))
        return [content[: self.limit(request)]]


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application; give its URL."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[Any, str]]:
    """The application, and where it is served without the layer."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    with serving(app) as url:
        yield app, url


@pytest.fixture
def proxy(s3_server: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The layer, which nodes' clients find."""
    proxy = Proxy(s3_server[0])
    with serving(proxy) as proxy.url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


@pytest.fixture
def bucket(
    s3_server: tuple[Any, str], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A new bucket ``data``, without the layer."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    found = boto3.resource("s3", endpoint_url=s3_server[1]).Bucket("data")
    found.create()
    yield found
    found.objects.all().delete()
    found.delete()
