"""Events: the lines by which a running job reports to the machine that submitted it.

Rank 0 prints JSON objects on standard output, one per line, each after :data:`PREFIX`; all other output is
log text. Only ``error`` events, and notes about a rank that is silent, come from any rank.

    start   world_size, hosts, backend, dtype, model, versions
    phase   name, such as load or train; when the phase begins
    resumed step, total; the step of the checkpoint that the run continues
    step    step, total, epoch, loss, lr; a few per second, and the last one. Also the latest speed of all
            ranks, samples_per_second and tokens_per_second (without padding), the resulting eta_seconds,
            and the hosts' shares of the computing power
    checkpoint  step, name, seconds; one was written
    stopped step, total, checkpoint (its name); after a SIGTERM, before exit code 143
    note    text
    trial   samples_per_second, steps, seconds; what a trial (--trial-seconds) measured
    result  the content of results.json
    error   message, hint, rank, host, lost_peer (true if this rank only saw the effect of another
            rank's failure)

Each has ``at``, the time in seconds since 1970. When a job begins again after the loss of a rank or node,
its batch script adds ``restarted``, with attempt and nodes.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

PREFIX = "@spr "
STEP_SECONDS = 0.25
"""Least time between two ``step`` events, so that fast steps do not flood the terminal."""


class Events:
    """Prints one rank's events; ranks other than 0 print only errors and warnings."""

    def __init__(
        self,
        rank: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._stream = stream
        self._clock = clock
        self._last_step: float | None = None

    def emit(self, event: str, **fields: object) -> None:
        """Print one event, on rank 0. Raises ``ValueError`` for a number that JSON lacks."""
        if self.rank == 0:
            self._write({"event": event, **fields})

    def note(self, text: str) -> None:
        """Print one line for the user."""
        self.emit("note", text=text)

    def warn(self, text: str) -> None:
        """Print one line for the user, on whichever rank this is."""
        self._write({"event": "note", "text": text})

    def step(self, step: int, total: int, **fields: object) -> None:
        """Print a finished step, unless the last one printed is very recent."""
        now = self._clock()
        recent = self._last_step is not None and now - self._last_step < STEP_SECONDS
        if step < total and recent:
            return
        self._last_step = now
        self.emit("step", step=step, total=total, **fields)

    def error(
        self, message: str, hint: str | None = None, *, lost_peer: bool = False, **more: object
    ) -> None:
        """Print why this rank ends, on every rank."""
        place = {"rank": self.rank, "host": socket.gethostname(), "lost_peer": lost_peer}
        self._write({"event": "error", "message": message, "hint": hint, **place, **more})

    def _write(self, fields: dict[str, object]) -> None:
        # One write per line: mpirun merges the ranks' output as it comes. (Tests replace sys.stdout.)
        stream = self._stream or sys.stdout
        timed = {**fields, "at": round(time.time(), 1)}
        stream.write(f"{PREFIX}{json.dumps(timed, allow_nan=False)}\n")
        stream.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event in a line of a job's output, or None for log text.

    Text before the prefix is skipped: it may be another rank's unfinished line.
    """
    _, found, text = line.partition(PREFIX)
    if not found:
        return None
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
