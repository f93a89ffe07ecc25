"""Every step's figures, one JSON object a line, written by every rank about itself.

metrics/rank-N.jsonl: ``step``; ``time``, seconds since training began, interruptions left out;
``loss``, the mean of all ranks; ``lr``; this rank's ``samples``, ``tokens`` (real ones) and ``padded``
(with padding); ``seconds`` of the step by what was done in them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from .errors import TrainingError

FOLDER = "metrics"
FLUSH_SECONDS = 5.0
"""At least so long between two writes: a process that is killed loses so much, and a checkpoint none."""


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
    """One rank's file, open for a ``with`` block.

    A disk that takes no more is told once to ``note``, and is no reason to end what goes well: the
    lines are kept, and written when there is room again.
    """

    def __init__(
        self,
        output: Path,
        rank: int,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note, self._told = note, False
        self._path = output / FOLDER / f"rank-{rank}.jsonl"
        self._clock = clock
        self._lines: list[str] = []
        self._written = clock()

    def begin(self, step: int) -> None:
        """Keep what is there up to that step, and drop what comes after it, as it is done again.

        Raises :class:`TrainingError` where that can't be done: nothing has been trained yet.
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
        """Take one step's figures; they are written some seconds later."""
        times = {name: round(value, 6) for name, value in figures.seconds.items()}
        fields = {**figures._asdict(), "time": round(figures.time, 4), "seconds": times}
        self._lines.append(json.dumps(fields) + "\n")
        if self._clock() - self._written >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was taken, as far as the disk takes it."""
        self._written = self._clock()
        size = None
        try:
            with self._path.open("ab") as file:
                size = file.tell()
                file.write("".join(self._lines).encode())
            self._lines = []
        except OSError as error:
            if size is not None:
                with suppress(OSError):  # no line twice, and none by halves
                    os.truncate(self._path, size)
            if not self._told:
                self._note(f"warning: {self._path} can't be written: {error.strerror}")
            self._told = True

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush()


def _lines_until(path: Path, step: int) -> list[str]:
    """The whole lines of steps up to that one; a killed process may have left half a line."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            known = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            break
        if not known or not line.endswith("\n"):
            break
        kept.append(line)
    return kept
