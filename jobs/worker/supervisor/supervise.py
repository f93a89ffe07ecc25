"""One attempt of a job: mpirun from its start to its end, and the log that it writes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.events import MARK, PREFIX, parse_event, render_event
from .launch import FOLDER, Launch, build_argv
from .notices import WAIT_S, NoticeWatch, describe_notice, has_no_room
from .slurm import SlurmJob
from .stall import StallDetector

ERROR_GRACE_S = 15.0
"""Time for mpirun to end a job of which a rank has failed: a node of it may be gone."""
LEAVE_S = 60.0
"""Time for ranks to save a checkpoint and to end when one of their nodes goes."""
POLL_S = 0.2
# Hydra's words when it can't start its ranks. Under Slurm it may then wait forever [tried: 2021.18].
_NOT_STARTED = re.compile(
    rb"error launching[_ ]processes|unable to run bstrap_proxy", re.IGNORECASE
)
# Hydra's report of a rank that ended by a signal, in two lines.
_RANK = re.compile(rb"RANK (\d{1,9}) PID \d+ RUNNING AT (\S+)")
# Its words when the connection to a node breaks, which may be before Slurm notices.
_LOST = re.compile(rb"Downstream from host (\S+) exited abnormally")
_KILLED = re.compile(rb"KILLED BY SIGNAL: (\d+ \(.*\))")
_FULL = b"No space left on device"
_PREFIX = PREFIX.encode()
_BLOCK = 1 << 18
_WORDS = (_PREFIX, b"RANK ", b"exited abnormally", b"KILLED BY SIGNAL")


@dataclass
class LogWatch:
    """Reads a growing log from where it ends now; keeps the errors that ranks report."""

    path: Path
    offset: int = 0
    mark: str = field(default_factory=lambda: os.environ.get(MARK, ""))
    """The mark of the job's events."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    failed_at: float | None = None
    """When the first failure was seen, by the monotonic clock."""
    start: dict[str, Any] = field(default_factory=dict)
    """The ranks' own report of where they run."""
    killed: dict[str, Any] = field(default_factory=dict)
    """The first rank that mpirun reports as killed, its node, and the signal."""
    disk_full: bool = False
    """Whether anything said that it could not write."""
    lost: tuple[str, ...] = ()
    """The nodes that mpirun has lost."""
    steps: StallDetector = field(default_factory=StallDetector)
    has_begun: bool = False
    """Whether ranks run: from now on, the log may contain anything that looks like mpirun's words."""
    _partial: bytes = b""

    @property
    def ends_amid_line(self) -> bool:
        """Whether a line was cut off, as by a full disk."""
        return bool(self._partial)

    def poll(self) -> None:
        """Read what is new."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while new := file.read(_BLOCK):
                self._read(new)

    def _read(self, new: bytes) -> None:
        self.offset += len(new)
        self.disk_full = self.disk_full or _FULL in new
        whole, end, self._partial = (self._partial + new).rpartition(b"\n")
        # All at once: a program may print millions of lines per second.
        is_ours = not self.has_begun or any(word in whole for word in _WORDS)
        for line in whole.split(b"\n") if end and is_ours else ():
            text = line.decode(errors="replace") if _PREFIX in line else ""
            if event := parse_event(text, self.mark):
                self._take(event)
            else:
                self._take_report(line)

    def _take_report(self, line: bytes) -> None:
        if not self.has_begun and _NOT_STARTED.search(line):
            self._note_failure()
        if lost := _LOST.search(line):
            self.lost += (lost[1].decode(errors="replace"),)
        if "signal" in self.killed:
            return
        if rank := _RANK.search(line):
            self.killed = {"rank": int(rank[1]), "node": rank[2].decode(errors="replace")}
        elif self.killed and (signal_ := _KILLED.search(line)):
            self.killed["signal"] = signal_[1].decode(errors="replace")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "error":
            self.errors.append(event)
            self._note_failure()
        elif kind == "start":
            self.start = event
        self.has_begun = self.has_begun or kind in ("start", "running")
        self.steps.see(kind, str(event.get("name", "")), time.monotonic())

    def _note_failure(self) -> None:
        self.failed_at = self.failed_at or time.monotonic()


@dataclass
class Attempt:
    """A run of mpirun. ``stop`` may be called from a signal handler."""

    launch: Launch
    job: SlurmJob
    watch: LogWatch
    notices: NoticeWatch
    stopping: bool = False
    leaving: dict[str, Any] = field(default_factory=dict)
    """Why the ranks were asked to end, if one of their nodes goes."""
    hang: dict[str, Any] = field(default_factory=dict)
    """Why this was killed, if no rank has taken a step for too long."""
    _process: subprocess.Popen[bytes] | None = None
    _forwarded_at: float | None = None

    def stop(self) -> None:
        """Ask the ranks to save a checkpoint and to end."""
        self.stopping = True

    def run(self) -> int:
        """Run mpirun to its end and return its exit code."""
        self._process = subprocess.Popen(
            ["bash", "-c", render_script(self.launch, self.job.nodes)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        while True:
            try:
                code = self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                self._look_after()
            else:
                self.watch.poll()
                self.kill()
                if code and not self.stopping:
                    self._blame_node()
                return code if code >= 0 else 128 - code

    def _look_after(self) -> None:
        self.watch.poll()
        failed, now = self.watch.failed_at, time.monotonic()
        if not self.stopping and failed is None and (found := self._find_notice()):
            self.leaving = found
            announce(event="note", text=f"{found['message']}; saving a checkpoint and stopping")
            self.stop()
        if self.stopping and self._forwarded_at is None:
            self._forwarded_at = now
            self._forward()
        since = self._forwarded_at if self.leaving else None
        if (failed is not None and now - failed > ERROR_GRACE_S) or (
            since is not None and now - since > LEAVE_S
        ):
            self.kill()
        elif not self.hang and (silent := self.watch.steps.stalled(now)):
            message = f"no step for {silent / 60:.0f} min: a rank hangs"
            self.hang = {"message": message, "lost_peer": True}
            self.kill()

    def _blame_node(self) -> None:
        """Find out whether the ranks failed because a node goes."""
        is_full = self.watch.disk_full or has_no_room()
        if is_full:
            self.notices.wait(self.job.nodes, WAIT_S)
        if is_full or not self.watch.errors:
            self.leaving = self._find_notice()

    def _find_notice(self) -> dict[str, Any]:
        return describe_notice(self.notices.found, self.job.nodes, self.launch.nproc_per_node)

    def _forward(self) -> None:
        """Pass SIGTERM to mpirun, which passes it to every rank of every node and waits for them."""
        assert self._process is not None
        group = str(self._process.pid)
        # Not to the shell scripts around it, which would not wait.
        found = subprocess.run(["pkill", "-TERM", "-g", group, "-x", "mpiexec.hydra"], check=False)
        if found.returncode:
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Kill what is left of this attempt, on all nodes."""
        self._signal_group(signal.SIGKILL)
        for step in self.job.steps():
            self.job.kill_step(step)

    def kill_rest(self) -> None:
        """Kill what another batch process of this job has left, on all nodes."""
        mark = f"{FOLDER}={self.launch.folder}".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            pid = int(environ.parent.name)
            with suppress(OSError):
                if pid != os.getpid() and mark in environ.read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        self.kill()

    def _signal_group(self, number: int) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def render_script(launch: Launch, nodes: Sequence[str]) -> str:
    """Return the shell script that becomes mpirun."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.exports.items()]
    # Now: a node that was replaced has its name, and another address.
    argv = build_argv(launch, nodes, socket.gethostbyname(nodes[0]))
    command = " ".join(shlex.quote(word) for word in argv)
    # After the setup: oneCCL's script points to the older MPI that it ships.
    return "\n".join([*launch.setup, *exports, f"exec {command}", ""])


def announce(*, amid_line: bool = False, **fields: object) -> None:
    """Print an event to the job's log, as a rank does; ``amid_line``, on a line of its own."""
    # The log's disk may be full.
    with suppress(OSError):
        print("\n" * amid_line + render_event(fields, os.environ.get(MARK, "")), flush=True)
