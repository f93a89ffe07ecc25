"""What the supervisor's loop reads: the job's log, the times of its steps, and which nodes are drained.

The nodes' health check drains a node that EC2 reclaims or whose disk is full, with Slurm's reason
``spot: …`` or ``disk: …``. A node drained for another reason keeps its jobs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.events import MARK, PREFIX, parse_event, render_event
from .commands import Running
from .log_reader import LONGEST

_ANSWER_S = 30.0
NOTICES = {
    "spot": "its node, {node}, goes: {text}",
    "disk": "its node, {node}, has a full disk: {text}",
}
"""What the reason of a drained node says, by its first word."""
IDLE_S, _IDLE_SHARE = 600.0, 0.01
"""A job counts as idle after this time with less than this share of one CPU."""
LEAST_S, FACTOR = 180.0, 10.0
"""A run counts as hung after this time without a step, or after this multiple of its longest step (or
evaluation), or after the time in which it may save a checkpoint."""
# Hydra's message when it can't start ranks. Under Slurm it may then wait forever [tried: 2021.18].
_NOT_STARTED = re.compile(
    rb"error launching[_ ]processes|unable to run bstrap_proxy", re.IGNORECASE
)
# Hydra's two-line report of a rank killed by a signal.
_RANK = re.compile(rb"RANK (\d{1,9}) PID (\d{1,9}) RUNNING AT (\S+)")
# Hydra's message when the connection to a node breaks, possibly before Slurm notices.
_LOST = re.compile(rb"Downstream from host (\S+) exited abnormally")
_KILLED = re.compile(rb"KILLED BY SIGNAL: (\d+ \(.*\))")
_FULL = b"No space left on device"
_PREFIX = PREFIX.encode()
_BLOCK = 1 << 18
_WORDS = (_PREFIX, b"RANK ", b"exited abnormally", b"KILLED BY SIGNAL")


@dataclass
class StallDetector:
    """Detects hangs from a run's events, only in the phase with steps: others print nothing."""

    longest: float = 0.0
    longest_evaluation: float = 0.0
    _since: float | None = None
    """The last sign of progress in the phase with steps."""
    _stepping: bool = False
    _evaluates: bool = False

    def see(self, kind: str, name: str, now: float) -> None:
        """Process an event; ``name`` is a phase's."""
        if kind == "phase":
            # The first step may compile the model: it is unbounded and counts as the longest.
            self._since, self._stepping = (now if name == "train" else None), False
            self._evaluates = False
        elif self._since is None:
            return
        elif kind == "step":
            self.longest = max(self.longest, now - self._since)
            self._since, self._stepping = now, True
        elif kind == "evaluating":
            # The first one takes as long as its data need, and the others hardly more.
            self._since, self._evaluates = now, True
        elif kind == "evaluation":
            self.longest_evaluation = max(self.longest_evaluation, now - self._since)
            self._since, self._evaluates = now, False
        elif kind == "checkpoint":
            self._since = now

    def stalled(self, now: float, least_s: float = LEAST_S) -> float:
        """Return the seconds without a step if there are too many, else 0."""
        longest = self.longest_evaluation if self._evaluates else self.longest
        if self._since is None or not (longest if self._evaluates else self._stepping):
            return 0.0
        silent = now - self._since
        return silent if silent > max(least_s, FACTOR * longest) else 0.0


@dataclass
class IdleWatch:
    """Notices that the ranks of this node use no CPU time while nothing is printed."""

    measure: Callable[[], float]
    """Returns the CPU seconds of the ranks so far."""
    size: int = 0
    """The log's size when it was last seen."""
    _used: float = 0.0
    _looked: float = 0.0
    _since: float = 0.0
    _next_s: float = IDLE_S

    def find(self, size: int, now: float) -> float:
        """Return for how many seconds nothing has happened, at 10, 20, 40, … minutes, else 0."""
        if not self._looked:  # the first time
            self.size, self._used, self._looked, self._since = size, self.measure(), now, now
        if now - self._looked < IDLE_S / 10:
            return 0.0
        used, passed, self._looked = self.measure(), now - self._looked, now
        # Heartbeats and waiting threads need a little.
        if size != self.size or used - self._used > _IDLE_SHARE * passed:
            self._since, self._next_s = now, IDLE_S
        self.size, self._used = size, used
        silent = now - self._since
        if silent < self._next_s:
            return 0.0
        self._next_s *= 2
        return silent


def measure_ranks(mark: bytes) -> float:
    """Return the CPU seconds of this node's processes that have a word in their environment and are ranks."""
    ticks = 0
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            words = environ.read_bytes().split(b"\0")
            if mark in words and any(word.startswith(b"PMI_RANK=") for word in words):
                fields = environ.with_name("stat").read_text(errors="replace").rpartition(")")[2]
                ticks += sum(map(int, fields.split()[11:15]))  # its own, and its ended children's
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class LogWatch:
    """Reads a growing log from its present end; keeps the errors that ranks report."""

    path: Path
    offset: int = 0
    mark: str = field(default_factory=lambda: os.environ.get(MARK, ""))
    """The mark of the job's events."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    failed_at: float | None = None
    """When the first failure was seen, by the monotonic clock."""
    start: dict[str, Any] = field(default_factory=dict)
    """The ranks' report of where they run."""
    killed: dict[str, Any] = field(default_factory=dict)
    """The first rank that mpirun reports as killed, its process and node, and the signal."""
    disk_full: bool = False
    """Whether a message reported a failed write."""
    checkpoint: str = ""
    measured_s: float = 0.0
    """The last checkpoint's name, and how long it took."""
    estimate_s: float = 0.0
    """How long the first checkpoint may take."""
    lost: tuple[str, ...] = ()
    """The nodes that mpirun has lost."""
    steps: StallDetector = field(default_factory=StallDetector)
    has_stopped: bool = False
    """Whether the ranks reported that they saved a checkpoint and stop, as they were told."""
    has_begun: bool = False
    """Whether ranks are running: from then on, program output may look like mpirun's messages."""
    partial: bytes = b""
    """A line without its end, which may have been cut off, as by a full disk."""

    @property
    def checkpoint_s(self) -> float:
        """How long a checkpoint takes, as far as is known."""
        return self.measured_s or self.estimate_s

    def poll(self) -> None:
        """Read what is new."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while new := file.read(_BLOCK):
                self._read(new)

    def _read(self, new: bytes) -> None:
        self.offset += len(new)
        self.disk_full = self.disk_full or _FULL in new
        whole, end, rest = (self.partial + new).rpartition(b"\n")
        # Such as a progress bar's. Its beginning and its end may each be an event.
        is_long = len(rest) > LONGEST
        self.partial = rest[: LONGEST // 2] + rest[-LONGEST // 2 :] if is_long else rest
        # In one batch: a program may print millions of lines per second.
        is_ours = not self.has_begun or any(word in whole for word in _WORDS)
        for line in whole.split(b"\n") if end and is_ours else ():
            text = line.decode(errors="replace") if _PREFIX in line else ""
            if event := parse_event(text, self.mark):
                self._take(event)
            else:
                self._take_report(line)

    def _take_report(self, line: bytes) -> None:
        if not self.has_begun and _NOT_STARTED.search(line):
            self.failed_at = self.failed_at or time.monotonic()
        if lost := _LOST.search(line):
            self.lost += (lost[1].decode(errors="replace"),)
        if "signal" in self.killed:
            return
        if rank := _RANK.search(line):
            node = rank[3].decode(errors="replace")
            self.killed = {"rank": int(rank[1]), "pid": int(rank[2]), "node": node}
        elif self.killed and (signal_ := _KILLED.search(line)):
            self.killed["signal"] = signal_[1].decode(errors="replace")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "error":
            self.errors.append(event)
            self.failed_at = self.failed_at or time.monotonic()
        elif kind == "start":
            self.start = event
        elif kind == "checkpoint":
            took = event.get("seconds")
            self.checkpoint = event["name"]
            self.measured_s = took if isinstance(took, float) else 0.0
        elif kind == "checkpoint_estimate":
            self.estimate_s = event["seconds"]
        self.has_stopped = self.has_stopped or kind == "stopped"
        self.has_begun = self.has_begun or kind in ("start", "running")
        self.steps.see(kind, str(event.get("name", "")), time.monotonic())


def describe_notice(
    notices: Mapping[str, str], nodes: Sequence[str], ranks_per_node: int
) -> dict[str, Any]:
    """Return a job's first leaving node as an error of its first rank; {} for none. Pure."""
    node = next((name for name in nodes if name in notices), None)
    if node is None:
        return {}
    kind, _, text = notices[node].partition(": ")
    return blame(node, nodes, ranks_per_node, NOTICES[kind].format(node=node, text=text))


def blame(node: str, nodes: Sequence[str], ranks_per_node: int, message: str) -> dict[str, Any]:
    """Return what happened to one of a job's nodes as an error of its first rank. Pure."""
    rank = nodes.index(node) * ranks_per_node
    return {"rank": rank, "host": node, "message": message, "lost_peer": True}


@dataclass
class Poll:
    """A command that runs again every few seconds beside the loop; ``take`` gets what it prints."""

    argv: Sequence[str]
    every_s: float
    take: Callable[[str], None]
    _running: Running | None = None
    _due: float = 0.0

    def turn(self, now: float) -> None:
        """Take the answer if there is one, or ask again."""
        if self._running is None and now >= self._due:
            self._running = Running(self.argv, _ANSWER_S)
        elif self._running and self._running.poll():
            self._due = now + self.every_s
            self.ask()

    def ask(self) -> None:
        """Wait for the answer."""
        found = (self._running or Running(self.argv, _ANSWER_S)).wait()
        self._running = None
        if not found.why:
            self.take(found.printed)


def announce(*, amid_line: bool = False, **fields: object) -> None:
    """Print an event to the job's log, as a rank does; ``amid_line`` starts a new line first."""
    say("\n" * amid_line + render_event(fields, os.environ.get(MARK, "")))


def say(text: str) -> None:
    """Print text to the job's log, whose disk may be full."""
    with suppress(OSError):
        print(text, flush=True)
