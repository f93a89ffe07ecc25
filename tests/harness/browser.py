"""A headless Chromium that opens one page and tells what happened there.

It is spoken to over two pipes in its own protocol, https://chromedevtools.github.io/devtools-protocol/,
so no port is opened and no other library needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_DEADLINE_S = 90
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)


def find_browser() -> str:
    """The browser's path. That there is none is a failure, not a reason to look away."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    assert found, "no Chromium on this machine: `make browser` installs it"
    return found


@dataclass
class Page:
    """A tab. ``complaints`` are console errors, exceptions and what the page could not load."""

    to_browser: int
    from_browser: int
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _session: str | None = None
    _last: int = 0
    _rest: bytes = b""
    _events: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, with its answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.from_browser], [], [], end - time.monotonic())
            assert ready, "the browser does not answer"
            more = os.read(self.from_browser, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, result = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(result["request"]["url"])
        bad = (
            method in ("Runtime.exceptionThrown", "Network.loadingFailed")
            or (method == "Runtime.consoleAPICalled" and result["type"] in ("error", "warning"))
            or (method == "Log.entryAdded" and result["entry"]["level"] in ("error", "warning"))
        )
        if bad:
            self.complaints.append(json.dumps(result))

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._note(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, asked from outside: the page itself runs no script."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def look(self, scheme: str, width: int) -> None:
        """Show the page in ``light`` or ``dark``, so many pixels wide."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> bytes:
        """The whole page as a PNG file."""
        result = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        content = base64.b64decode(result["data"])
        path.write_bytes(content)
        return content

    def print(self, path: Path) -> bytes:
        """The page on paper, as a PDF file."""
        content = base64.b64decode(self.call("Page.printToPDF")["data"])
        path.write_bytes(content)
        return content


@contextmanager
def open_page(page: Path, profile: Path) -> Iterator[Page]:
    """A browser with that page, and nothing left of it afterwards but its empty profile."""
    their_in, to_browser = os.pipe()
    from_browser, their_out = os.pipe()

    def arrange() -> None:
        # In this order: either of ours may be one of theirs.
        source, sink = os.dup(their_in), os.dup(their_out)
        os.dup2(source, 3)
        os.dup2(sink, 4)

    process = subprocess.Popen(
        [find_browser(), *_FLAGS, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=arrange,
        close_fds=False,
        start_new_session=True,
    )
    os.close(their_in)
    os.close(their_out)
    try:
        tab = Page(to_browser, from_browser)
        tab.open(page)
        yield tab
    finally:
        os.close(to_browser)
        os.close(from_browser)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
