"""Rank 0's coordinator, served to all ranks over XML-RPC. Runs on Python 3.8."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any
from xmlrpc.client import ServerProxy, Transport
from xmlrpc.server import SimpleXMLRPCServer

from .stop import PAUSE_S, Stop

CONNECT_S = 120.0
"""The ranks come within this time once rank 0 serves."""
READY_S = 12 * 3600.0
"""Rank 0 may bring files from other nodes first. If it is lost meanwhile, the heartbeat ends the others."""


class _Server(SimpleXMLRPCServer):
    request_queue_size = 1024


@contextmanager
def serving(coordinator: Any, address: str, port: int) -> Iterator[None]:
    """Serve a coordinator's methods, those in ``SERVED``, in its own thread: a context manager."""

    def call(text: Any) -> str:
        method, *arguments = json.loads(str(text))
        if method not in coordinator.SERVED:
            raise ValueError(method)
        return json.dumps(getattr(coordinator, method)(*arguments))

    with _Server((address, port), logRequests=False) as server:
        server.register_function(call, "call")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()


class _OneTry(Transport):
    """Sends no request a second time: the first may have been answered."""

    def request(self, host: Any, handler: str, request_body: Any, verbose: bool = False) -> Any:
        return self.single_request(host, handler, request_body, verbose)


@dataclass
class Remote:
    """The coordinator, from any rank."""

    address: str
    port: int
    stop: Stop
    _until: float = field(default_factory=lambda: time.monotonic() + READY_S)
    """When a rank 0 that does not answer is no longer only starting."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method. Raises ``OSError`` if rank 0 does not answer."""
        text = json.dumps([method, *arguments])
        while True:
            try:
                proxy = ServerProxy(f"http://{self.address}:{self.port}", transport=_OneTry())
                answer = json.loads(str(proxy.call(text)))
            except ConnectionRefusedError:
                if self.stop.requested or time.monotonic() > self._until:
                    raise
                time.sleep(PAUSE_S)
            else:
                self._until = 0.0
                return answer
