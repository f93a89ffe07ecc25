"""The lines by which a running job tells the submitting machine how it goes.

Rank 0 prints JSON objects on standard output, one per line, each after :data:`PREFIX`; everything
else on the job's output is log text. A rank that fails prints an ``error`` event whatever its rank.

    start   world_size, hosts, backend, dtype, model, versions
    phase   name: load, tokenize, train, evaluate or save; at the phase's beginning
    resumed step, total; the checkpoint's step, from which the run goes on
    step    step, total, epoch, loss, lr; a few per second, and the last one. With the latest speed of
            all ranks, samples_per_second and tokens_per_second (without padding), the eta_seconds
            that follow from it, and the shares of the hosts in the computing power
    checkpoint  step, name, seconds; one was written
    stopped step, total, checkpoint (its name); after a SIGTERM, before exit code 143
    note    text
    trial   samples_per_second, steps, seconds; what a trial (--trial-seconds) has measured
    result  the content of results.json
    error   message, hint, rank, host, lost_peer (true where only the effect of another rank's
            failure was seen: that other rank has, or had, the cause)
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
"""At least so long between two ``step`` events, so that fast steps do not flood the terminal."""


class Events:
    """Prints one rank's events; all but errors are dropped on ranks other than 0."""

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
        """Print one event from rank 0. Raises ``ValueError`` for a number JSON does not have."""
        if self.rank == 0:
            self._write({"event": event, **fields})

    def note(self, text: str) -> None:
        """Say something that the user should know, in one line."""
        self.emit("note", text=text)

    def step(self, step: int, total: int, **fields: object) -> None:
        """Report a finished optimizer step, unless the last report is very recent."""
        now = self._clock()
        recent = self._last_step is not None and now - self._last_step < STEP_SECONDS
        if step < total and recent:
            return
        self._last_step = now
        self.emit("step", step=step, total=total, **fields)

    def error(
        self, message: str, hint: str | None = None, *, lost_peer: bool = False, **more: object
    ) -> None:
        """Report why this rank ends; the only event that every rank prints."""
        place = {"rank": self.rank, "host": socket.gethostname(), "lost_peer": lost_peer}
        self._write({"event": "error", "message": message, "hint": hint, **place, **more})

    def _write(self, fields: dict[str, object]) -> None:
        # The stream is looked up late (tests replace sys.stdout), and written to once per line:
        # mpirun merges the ranks' output as it comes.
        stream = self._stream or sys.stdout
        stream.write(f"{PREFIX}{json.dumps(fields, allow_nan=False)}\n")
        stream.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """The event in a line of a job's output, or None where the line is log text.

    Text before the prefix is skipped: another rank's unfinished line may stand there.
    """
    _, found, text = line.partition(PREFIX)
    if not found:
        return None
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
