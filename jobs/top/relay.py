"""Relay: runs on the head while a user watches, starts all nodes' samplers, and merges their lines.

It prints one line of JSON per interval: the nodes' metrics, the progress in running jobs' logs, and the
queue. A node that does not answer is included with the reason, and retried. Like
:mod:`provision.on_node.sampler`, it uses only the standard library, leaves no file, and ends with its
standard input or some time after the last beat. The samplers end with it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

from jobs.top.queue_and_logs import CONNECTING, JobLogs, no_queue, read_queue
from provision.on_node.everywhere import over_ssh
from provision.on_node.sampler import set_end

_RETRY_S = 10.0
_BEAT_S = _QUEUE_S = 5.0


class NodeLink:
    """The sampler of one node, kept running over SSH by a thread. ``interval`` is in seconds."""

    def __init__(self, name: str, argv: list[str], greeting: bytes, interval: float) -> None:
        self.name = name
        self._argv, self._greeting = argv, greeting
        self._patience = 3 * interval + 3
        self._process: subprocess.Popen[bytes] | None = None
        self._line, self._heard, self._error = b"", 0.0, CONNECTING
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        while True:
            try:
                self._error = self._follow()
            except Exception as error:  # also a defect: else the node would seem to be silent
                self._error = str(error) or repr(error)
            time.sleep(_RETRY_S)

    def _follow(self) -> str:
        """Start the sampler, and keep its last line; return why it ended."""
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )
            with process:
                _send(process, self._greeting)
                self._process = process
                assert process.stdout is not None
                for line in process.stdout:
                    self._line, self._heard, self._error = line, time.monotonic(), ""
                process.kill()
            said.seek(0)
            reason = said.read().decode(errors="replace").splitlines()
        return reason[-1] if reason else f"ended with {process.returncode}"

    def beat(self) -> None:
        if self._process is not None:
            _send(self._process, b"\n")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()

    def figures(self, now: float) -> dict[str, Any]:
        """Return the node's metrics, or why there are none."""
        if error := self._error:  # first: `_heard` is set before it is cleared
            return {"name": self.name, "error": error}
        if (silent := now - self._heard) > self._patience:
            return {"name": self.name, "error": f"no answer for {silent:.0f} s"}
        try:
            return {"name": self.name, **json.loads(self._line)}
        except ValueError:
            return {"name": self.name, "error": self._line.decode(errors="replace").strip()[:200]}


def _send(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # reading its output detects its end
        os.write(process.stdin.fileno(), text)


class Relay:
    """All nodes, the queue, and the logs, as one line."""

    def __init__(self, plan: dict[str, Any]) -> None:
        folder = os.path.abspath(os.path.expanduser(plan["jobs"]))  # noqa: PTH100, PTH111
        self.interval = float(plan["interval_s"])
        head, *workers = plan["nodes"]
        commands = {head: plan["argv"], **{n: over_ssh(n, plan["argv"], 10) for n in workers}}
        greeting = plan["stdin"].encode()
        self._links = [NodeLink(n, argv, greeting, self.interval) for n, argv in commands.items()]
        self._queue = no_queue(CONNECTING)
        threading.Thread(target=self._watch_queue, args=(plan["queue"],), daemon=True).start()
        self._logs = JobLogs(folder)

    def _watch_queue(self, argv: list[str]) -> None:
        while True:
            self._queue = read_queue(argv)
            time.sleep(_QUEUE_S)

    def work(self) -> None:
        """Print a line per interval until standard input ends, or standard output is closed."""
        due = beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= beat:
                beat = now + _BEAT_S
                for link in self._links:
                    link.beat()
            if now >= due:
                print(json.dumps(self._merge(now)), flush=True)
                due = max(due + self.interval, now + self.interval / 2)
            if select.select([0], [], [], max(0.0, due - time.monotonic()))[0]:
                if not os.read(0, 4096):
                    return
                set_end(self.interval)

    def _merge(self, now: float) -> dict[str, Any]:
        nodes = [link.figures(now) for link in self._links]
        running = {rank["job"] for node in nodes for rank in node.get("ranks", ())}
        queue = self._queue
        running |= {row["name"] for row in queue["queue"] if row["state"] == "RUNNING"}
        jobs = self._logs.look({job for job in running if "/" not in job}, time.time())
        return {"time": round(time.time(), 3), "nodes": nodes, "jobs": jobs, **queue}

    def end(self) -> None:
        """End the samplers, which would exit by themselves some seconds later."""
        for link in self._links:
            link.end()


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
