"""Each rank's figures of every step: ``metrics/rank-N.jsonl``, one JSON object per line.

``step``; ``time``, seconds since training began, without interruptions; ``loss``, the mean of all ranks;
``lr``; this rank's ``samples``, ``tokens`` (without padding), and ``padded`` (with padding); ``seconds`` of
the step by activity.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .errors import TrainingError

FOLDER = "metrics"
FLUSH_SECONDS = 5.0
"""Least time between two writes. A killed process loses at most this much, a checkpoint nothing."""


class StepFigures(NamedTuple):
    """One rank's figures of one step."""

    step: int
    time: float
    loss: float
    lr: float
    samples: int
    tokens: int
    padded: int
    seconds: Mapping[str, float]


class Metrics:
    """One rank's file, flushed at the end of a ``with`` block.

    A full disk does not stop training: ``note`` gets one warning, and the lines are kept until there
    is room.
    """

    def __init__(
        self,
        output: Path,
        rank: int,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note, self._warned = note, False
        self._path = output / FOLDER / f"rank-{rank}.jsonl"
        self._clock = clock
        self._lines: list[str] = []
        self._written = clock()

    def begin(self, step: int) -> None:
        """Keep the lines up to that step, and drop later ones, whose steps will be repeated.

        Raises :class:`TrainingError` if the file can't be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = _lines_until(self._path, step) if step and self._path.exists() else []
            partial = self._path.with_name(f".{self._path.name}.partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            raise TrainingError(f"{self._path} can't be written: {error.strerror}") from error

    def add(self, figures: StepFigures) -> None:
        """Add one step's figures, to be written within seconds."""
        times = {name: round(value, 6) for name, value in figures.seconds.items()}
        fields = {**figures._asdict(), "time": round(figures.time, 4), "seconds": times}
        self._lines.append(json.dumps(fields) + "\n")
        if self._clock() - self._written >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added, if the disk has room."""
        self._written = self._clock()
        size = None
        try:
            with self._path.open("ab") as file:
                size = file.tell()
                file.write("".join(self._lines).encode())
            self._lines = []
        except OSError as error:
            if size is not None:
                with suppress(OSError):  # no line twice, and no half line
                    os.truncate(self._path, size)
            if not self._warned:
                self._note(f"warning: {self._path} can't be written: {error.strerror}")
            self._warned = True

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def _lines_until(path: Path, step: int) -> list[str]:
    """Return the whole lines up to that step; a killed process may have left half a line."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            known = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        if not known or not line.endswith("\n"):
            break
        kept.append(line)
    return kept
