"""A package index of the tests' own on loopback: PEP 503 pages and wheels with nothing in them."""

from __future__ import annotations

import io
import os
import re
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

import pytest


def make_wheel(
    name: str, version: str, needs: Sequence[str] = (), extras: Sequence[str] = ()
) -> bytes:
    """A wheel whose only content is its metadata."""
    info = f"{name}-{version}.dist-info"
    requires = "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    requires += "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        "RECORD": "",
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{info}/{file}", text)
    return content.getvalue()


@dataclass
class PackageIndex:
    """What it serves. ``silent`` are paths that get no answer; ``statuses`` are refused with a code."""

    url: str
    pages: dict[str, dict[str, bytes]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, version: str, tag: str = "py3-none-any", **more: Any) -> None:
        """Add a release; ``name`` is normal, the wheel's own has underscores."""
        wheel = name.replace("-", "_")
        page = self.pages.setdefault(f"/{name}/", {})
        page[f"{wheel}-{version}-{tag}.whl"] = make_wheel(wheel, version, **more)

    def answer(self, path: str) -> tuple[int, bytes]:
        """Answer a request; as a proxy, one for any host."""
        self.asked.append(path)
        path = re.sub("^http://[^/]*", "", path) or "/"
        if path in self.silent:
            self.released.wait(30)
        if path in self.statuses:
            return self.statuses[path], b""
        if path == "/":
            return 200, b"<!DOCTYPE html><html></html>"
        if path == "/links":
            files = {name: data for page in self.pages.values() for name, data in page.items()}
            return 200, _render(files, "/files/")
        if path in self.pages:
            return 200, _render(self.pages[path], "/files/")
        for page in self.pages.values():
            name = path.removeprefix("/files/")
            if name in page:
                return 200, page[name]
        return 404, b""


def _render(files: dict[str, bytes], folder: str) -> bytes:
    links = "".join(f'<a href="{folder}{quote(name)}">{name}</a>\n' for name in files)
    return f"<!DOCTYPE html><html><body>\n{links}</body></html>".encode()


@contextmanager
def serve_index() -> Iterator[PackageIndex]:
    """An empty index, for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            status, content = index.answer(unquote(self.path))
            self.send_response(status)
            kind = "application/octet-stream" if self.path.endswith(".whl") else "text/html"
            self.send_header("Content-Type", kind)
            self.send_header("Cache-Control", "max-age=600, public")  # as PyPI does
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            return None

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            return None  # a client that did not wait

    server = Server(("127.0.0.1", 0), Handler)
    index = PackageIndex(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield index
    finally:
        index.released.set()
        server.shutdown()
        thread.join(60)
        server.server_close()


@contextmanager
def serve_only_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """An empty index in PyPI's place, without this machine's configuration of pip and uv."""
    for name in [name for name in os.environ if name.startswith("PIP_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    with serve_index() as index:
        known = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url}
        for name, value in {**known, "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}.items():
            monkeypatch.setenv(name, value)
        yield index
