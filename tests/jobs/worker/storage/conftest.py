from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer


@dataclass
class Proxy:
    """A TCP proxy before S3 that counts, cuts, and falsifies answers. Each connection has one request."""

    upstream: tuple[str, int]
    requests: list[str] = field(default_factory=list)
    limit: Callable[[str], int | None] = lambda _: None
    """After how many bytes the answer to a request is cut; ``None``: never."""
    change: Callable[[str, bytes], bytes] = lambda _, block: block
    answer: Callable[[str], bytes] = lambda _: b""
    """The answer to a request, instead of S3's."""
    _socket: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._socket.getsockname())

    @property
    def gets(self) -> list[str]:
        """The requests for objects, or parts of them."""
        return [each for each in self.requests if each.startswith("GET /data/")]

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.upstream) as server:
            head = b""
            while b"\r\n\r\n" not in head:
                block = client.recv(1 << 16)
                if not block:
                    return
                head += block
            found = re.search(rb"(?im)^range: (\S+)", head)
            request = head.split(b" HTTP", 1)[0].decode() + (
                f" {found[1].decode()}" if found else ""
            )
            self.requests.append(request)
            if own := self.answer(request):
                client.sendall(own)
                return
            server.sendall(head)
            threading.Thread(target=self._relay_body, args=(client, server), daemon=True).start()
            self._relay(request, server, client)
            # The other thread's `recv` would keep a closed socket open.
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _relay_body(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while block := client.recv(1 << 16):
                server.sendall(block)

    def _relay(self, request: str, server: socket.socket, client: socket.socket) -> None:
        limit, sent = self.limit(request), 0
        while block := server.recv(1 << 16):
            block = self.change(request, block)[: None if limit is None else limit - sent]
            try:
                client.sendall(block)
            except OSError:
                return
            sent += len(block)
            if limit is not None and sent >= limit:
                return


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield "127.0.0.1", port
    server.stop()


@pytest.fixture
def proxy(s3_server: tuple[str, int]) -> Iterator[Proxy]:
    proxy = Proxy(s3_server)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def bucket(
    s3_server: tuple[str, int], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A new bucket ``data`` without the proxy between; nodes' clients find the proxy."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": proxy.url,
    }.items():
        monkeypatch.setenv(name, value)
    url = "http://{}:{}".format(*s3_server)
    found = boto3.resource("s3", endpoint_url=url).Bucket("data")
    found.create()
    yield found
    found.objects.all().delete()
    found.delete()
