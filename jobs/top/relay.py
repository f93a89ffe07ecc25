"""Relay: runs on the head while somebody looks, starts the samplers of all nodes, and merges their lines.

It prints one line of JSON per interval: the nodes' figures, what the running jobs' logs say, and the queue.
A node that does not answer is in it, too, with the reason, and is asked again. Like :mod:`jobs.top.sampler`,
it uses the standard library alone, leaves no file, and ends with its standard input, or some time after its
last beat. The samplers' standard inputs end with it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from jobs.top.sampler import set_end

CONNECTING = "connecting"
_RETRY_S = 10.0
_QUEUE_S = 5.0
_LOG_BYTES = 65536
_EVENT = b'@spr {"event": "'
_STEP = ("step", "total", "loss", "samples_per_second", "eta_seconds")
_KEPT = {"step": {name: name for name in _STEP}, "phase": {"name": "phase"}}
"""By event: the fields that are kept, and their names here."""
_LISTED_JOBS = 100


class NodeLink:
    """The sampler of one node, kept running over SSH. ``interval`` is in seconds."""

    def __init__(self, name: str, argv: list[str], greeting: bytes, interval: float) -> None:
        self.name = name
        self._argv, self._greeting = argv, greeting
        self._patience = 3 * interval + 3
        self._process: subprocess.Popen[bytes] | None = None
        self._unread, self._line = b"", b""
        self._error, self._heard, self._retry = CONNECTING, 0.0, 0.0

    def start(self, selector: selectors.BaseSelector, now: float) -> None:
        """Start the sampler if it does not run, and was not started a moment ago."""
        if self._process is not None or now < self._retry:
            return
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
        self.send(self._greeting)

    def send(self, text: bytes) -> None:
        """Send what the sampler needs to begin, and then to go on."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # its end shows when its output is read
                self._process.stdin.write(text)

    def read(self, selector: selectors.BaseSelector, now: float) -> None:
        """Take what the sampler has printed; keep its last whole line."""
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
        """Remove a process that has ended; return why it did."""
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
        """Return the node's figures, or why there are none."""
        silent = now - self._heard
        if not self._error and silent > self._patience:
            return {"name": self.name, "error": f"no answer for {silent:.0f} s"}
        if self._error:
            return {"name": self.name, "error": self._error}
        try:
            return {"name": self.name, **json.loads(self._line)}
        except ValueError:
            return {"name": self.name, "error": self._line.decode(errors="replace")[:200]}


class QueueReader:
    """The queue, asked every few seconds, without waiting for an answer."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = float("-inf")
        # Unlike a pipe, it holds a queue of any length.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self.answer = _no_queue(CONNECTING)

    def look(self, now: float) -> None:
        """Take an answer that has arrived; ask again when that is due."""
        if self._process is not None:
            if self._process.poll() is not None:
                self.answer = self._take(self._process.returncode)
                self._process = None
            elif now - self._asked > _RETRY_S:
                self.end()
                self.answer = _no_queue(f"{self._argv[0]} does not answer")
        elif now - self._asked >= _QUEUE_S:
            self._asked = now
            self._ask()

    def _ask(self) -> None:
        self._out.seek(0)
        self._out.truncate()
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=subprocess.STDOUT,
            )
        except FileNotFoundError:
            self.answer = _no_queue(f"{self._argv[0]} is not installed on the head")
        except OSError as error:
            self.answer = _no_queue(str(error))

    def _take(self, code: int) -> dict[str, Any]:
        self._out.seek(0)
        lines = self._out.read().decode(errors="replace").splitlines()
        if code:
            return _no_queue(f"{self._argv[0]}: {lines[-1] if lines else f'ended with {code}'}")
        rows = [row for row in map(parse_queue_line, lines) if row]
        rows.sort(key=lambda row: row["state"] == "PENDING")
        return {"queue": rows[:_LISTED_JOBS], "queued": len(rows), "queue_error": ""}

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _no_queue(why: str) -> dict[str, Any]:
    return {"queue": [], "queued": 0, "queue_error": why}


def parse_queue_line(line: str) -> dict[str, Any] | None:
    """Parse a line of ``squeue -o '%A|%j|%T|%M|%D|%N|%r'``; a job's name may hold anything."""
    number, _, rest = line.partition("|")
    parts = rest.rsplit("|", 5)
    if len(parts) != 6 or not parts[3].isdigit():
        return None
    name, state, passed, nodes, where, reason = parts
    row = {"id": number, "name": name, "state": state, "passed": passed}
    return {**row, "nodes": int(nodes), "where": where, "reason": reason}


class LogTail:
    """What the last events in a job's log say. Its cost does not depend on the log's length."""

    def __init__(self, path: str) -> None:
        self._path, self._offset = path, 0
        self._known: dict[str, Any] = {}

    def look(self, now: float) -> dict[str, Any]:
        """Return the last step's fields and the phase; nothing without a log."""
        try:
            found = os.stat(self._path)  # noqa: PTH116
            if found.st_size < self._offset:
                self._offset, self._known = 0, {}
            if found.st_size > self._offset:
                self._read(found.st_size)
        except OSError:
            return {}
        return {**self._known, "age_s": round(max(0.0, now - found.st_mtime), 1)}

    def _read(self, size: int) -> None:
        with open(self._path, "rb") as file:  # noqa: PTH123
            file.seek(max(self._offset, size - _LOG_BYTES))
            text = file.read(_LOG_BYTES)
            self._offset = file.tell()
        last = {}
        for line in text.split(b"\n"):
            if line.startswith(_EVENT):
                last[line[len(_EVENT) : line.find(b'"', len(_EVENT))].decode()] = line
        for kind, names in _KEPT.items():
            with suppress(ValueError, KeyError):
                event = json.loads(last[kind][len("@spr ") :])
                self._known.update({new: event[old] for old, new in names.items()})


class JobLogs:
    """The logs of the jobs that run now."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tails: dict[str, LogTail] = {}

    def look(self, jobs: set[str], now: float) -> list[dict[str, Any]]:
        """Return each job's progress, by its log."""
        known = self._tails
        self._tails = {
            job: known.get(job) or LogTail(f"{self._folder}/{job}/log") for job in sorted(jobs)
        }
        return [{"job": job, **tail.look(now)} for job, tail in self._tails.items()]


class Relay:
    """All nodes, the queue, and the logs, as one line."""

    def __init__(self, plan: dict[str, Any], greeting: bytes) -> None:
        folder = os.path.abspath(os.path.expanduser(plan["jobs"]))  # noqa: PTH100, PTH111
        self.interval = float(plan["interval_s"])
        nodes = plan["nodes"].items()
        self._links = [NodeLink(name, argv, greeting, self.interval) for name, argv in nodes]
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
                    link.start(self.selector, now)
                    link.send(b"\n")
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
        """End what it started. The samplers would end by themselves, some seconds later."""
        for link in self._links:
            link.end()
        self._queue.end()


def main() -> None:
    """Its next lines are the plan, and how many lines follow that are the samplers' own input."""
    plan = json.loads(sys.stdin.readline())
    greeting = "".join(sys.stdin.readline() for _ in range(plan["greeting"])).encode()
    set_end(float(plan["interval_s"]))
    relay = Relay(plan, greeting)
    try:
        relay.work()
    except BrokenPipeError:
        os._exit(0)
    finally:
        relay.end()
