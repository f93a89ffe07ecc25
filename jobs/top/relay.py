"""Relay: runs on the head while a user watches, starts all nodes' samplers, and merges their lines.

It prints one line of JSON per interval: the nodes' metrics, the progress in running jobs' logs, and the
queue. A node that does not answer is included with the reason, and retried. Like
:mod:`provision.on_node.sampler`, it uses only the standard library, leaves no file, and ends with its
standard input or some time after the last beat. The samplers end with it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from jobs.top.queue_and_logs import CONNECTING, JobLogs, QueueReader
from provision.on_node.everywhere import over_ssh
from provision.on_node.sampler import set_end

_RETRY_S = 10.0
_BEAT_S = 5.0


class NodeLink:
    """The sampler of one node, kept running over SSH. ``interval`` is in seconds."""

    def __init__(self, name: str, argv: list[str], greeting: bytes, interval: float) -> None:
        self.name = name
        self._argv, self._greeting = argv, greeting
        self._patience = 3 * interval + 3
        self._process: subprocess.Popen[bytes] | None = None
        self._unread, self._line = b"", b""
        self._error = CONNECTING
        self._heard = self._retry = self._beat = 0.0

    def keep(self, selector: selectors.BaseSelector, now: float) -> None:
        """Send a beat if due; start the sampler if it is not running and was not just started."""
        if self._process is not None:
            if now >= self._beat:
                self._beat = now + _BEAT_S
                self._send(b"\n")
        elif now >= self._retry:
            self._start(selector, now)

    def _start(self, selector: selectors.BaseSelector, now: float) -> None:
        self._retry, self._unread, self._line = now + _RETRY_S, b"", b""
        try:
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            self._error = str(error)
            return
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ, self)
        self._send(self._greeting)

    def _send(self, text: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # reading its output detects its end
                self._process.stdin.write(text)

    def read(self, selector: selectors.BaseSelector, now: float) -> None:
        """Read the sampler's output; keep its last complete line."""
        assert self._process is not None
        assert self._process.stdout is not None
        text = os.read(self._process.stdout.fileno(), 1 << 16)
        if not text:
            selector.unregister(self._process.stdout)
            self._error = self._bury()
            return
        *lines, self._unread = (self._unread + text).split(b"\n")
        if lines:
            self._line, self._heard, self._error = lines[-1], now, ""

    def _bury(self) -> str:
        """Clean up a process that has ended; return why it ended."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stderr is not None
        with process:
            process.kill()
            reason = (process.stderr.read(4096) or b"").decode(errors="replace").splitlines()
        return reason[-1] if reason else f"ended with {process.returncode}"

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()

    def figures(self, now: float) -> dict[str, Any]:
        """Return the node's metrics, or why there are none."""
        silent = now - self._heard
        if not self._error and silent > self._patience:
            return {"name": self.name, "error": f"no answer for {silent:.0f} s"}
        if self._error:
            return {"name": self.name, "error": self._error}
        try:
            return {"name": self.name, **json.loads(self._line)}
        except ValueError:
            return {"name": self.name, "error": self._line.decode(errors="replace")[:200]}


class Relay:
    """All nodes, the queue, and the logs, as one line."""

    def __init__(self, plan: dict[str, Any]) -> None:
        folder = os.path.abspath(os.path.expanduser(plan["jobs"]))  # noqa: PTH100, PTH111
        self.interval = float(plan["interval_s"])
        head, *workers = plan["nodes"]
        commands = {head: plan["argv"], **{n: over_ssh(n, plan["argv"], 10) for n in workers}}
        greeting = plan["stdin"].encode()
        self._links = [NodeLink(n, argv, greeting, self.interval) for n, argv in commands.items()]
        self._queue = QueueReader(plan["queue"])
        self._logs = JobLogs(folder)
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)

    def work(self) -> None:
        """Print a line per interval until standard input ends, or standard output is closed."""
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                self._queue.look(now)
                for link in self._links:
                    link.keep(self.selector, now)
                print(json.dumps(self._merge(now)), flush=True)
                due = max(due + self.interval, now + self.interval / 2)
            for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                if key.data is not None:
                    key.data.read(self.selector, time.monotonic())
                elif not os.read(0, 4096):
                    return
                else:
                    set_end(self.interval)

    def _merge(self, now: float) -> dict[str, Any]:
        nodes = [link.figures(now) for link in self._links]
        running = {rank["job"] for node in nodes for rank in node.get("ranks", ())}
        queue = self._queue.answer
        running |= {row["name"] for row in queue["queue"] if row["state"] == "RUNNING"}
        jobs = self._logs.look({job for job in running if "/" not in job}, time.time())
        return {"time": round(time.time(), 3), "nodes": nodes, "jobs": jobs, **queue}

    def end(self) -> None:
        """End the samplers, which would exit by themselves some seconds later."""
        for link in self._links:
            link.end()
        self._queue.end()


def main() -> None:
    """Reads the plan, one line of input: what to watch, and the samplers' command and input."""
    plan = json.loads(sys.stdin.readline())
    set_end(float(plan["interval_s"]))
    relay = Relay(plan)
    try:
        relay.work()
    except BrokenPipeError:
        os._exit(0)
    finally:
        relay.end()
