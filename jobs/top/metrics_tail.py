"""The end of a rank's metrics file. Runs on the nodes: see :mod:`jobs.top.sampler`.

The file is described in jobs/worker/runtime/output.py. A look costs the same for a long file and a short
one, and for fast steps and slow ones.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

_TAIL_BYTES = 16384
"""The most that one look parses."""
_WINDOW_S = 20.0
"""Of training, over which a rank's figures are averaged."""


class TailStep(NamedTuple):
    """One step: ``own`` of its ``whole`` seconds were not spent waiting for other ranks."""

    step: int
    time: float
    loss: float
    samples: float
    whole: float
    own: float


def parse_step(line: bytes) -> TailStep:
    """Parse a line of a metrics file. Raises what a damaged line raises."""
    row = json.loads(line)
    seconds = row["seconds"]
    whole = float(sum(seconds.values()))
    own = whole - seconds.get("communication", 0.0)
    found = TailStep(
        int(row["step"]), float(row["time"]), float(row["loss"]), float(row["samples"]), whole, own
    )
    if not all(map(math.isfinite, found._replace(loss=0.0))):
        raise ValueError(line)
    return found


class MetricsTail:
    """The last steps of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._age_s = 0.0
        self._mark = (0, 0, 0)
        self._offset = 0
        self._steps: deque[TailStep] = deque(maxlen=64)

    def look(self, now: float) -> None:
        """Read what was added since the last look."""
        try:
            found = os.stat(self.path)  # noqa: PTH116
            self._age_s = max(0.0, now - found.st_mtime)
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            if mark == self._mark:
                return
            if found.st_ino != self._mark[0] or found.st_size < self._offset:
                # A run that is resumed replaces its file.
                self._offset = 0
                self._steps.clear()
            self._mark = mark
            self._read(found.st_size)
        except OSError:
            self._steps.clear()

    def _read(self, size: int) -> None:
        begin = max(self._offset, size - _TAIL_BYTES)
        with open(self.path, "rb") as file:  # noqa: PTH123
            file.seek(begin)
            text = file.read(_TAIL_BYTES)
        if begin > self._offset:
            self._steps.clear()
            first = text.find(b"\n") + 1
            begin, text = begin + first, text[first:]
        whole = text[: text.rfind(b"\n") + 1]
        self._offset = begin + len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self._steps.append(parse_step(line))

    def figures(self) -> dict[str, Any]:
        """Return the newest step and averages over the last seconds; nothing before the first step."""
        if not self._steps:
            return {}
        steps, last = list(self._steps), self._steps[-1]
        recent = [each for each in steps if each.time >= last.time - _WINDOW_S]
        steps = recent if len(recent) > 1 else steps[-2:]
        found: dict[str, Any] = {"step": last.step, "age_s": round(self._age_s, 1)}
        found["loss"] = last.loss if math.isfinite(last.loss) else None
        passed = last.time - steps[0].time
        if passed > 0:
            samples = sum(each.samples for each in steps[1:])
            found["samples_per_second"] = round(samples / passed, 3)
        whole, own = sum(each.whole for each in steps), sum(each.own for each in steps)
        if whole > 0:
            found["communication"] = round(1 - own / whole, 4)
            found["own_seconds"] = round(own / len(steps), 6)
        return found
