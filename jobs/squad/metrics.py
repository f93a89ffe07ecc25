"""Every step's figures, one JSON object a line, written by every rank about itself.

metrics/rank-N.jsonl: ``step``; ``time``, seconds since training began, interruptions left out;
``loss``, the mean of all ranks; ``lr``; this rank's ``samples``, ``tokens`` (real ones) and ``padded``
(with padding); ``seconds`` of the step by what was done in them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
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
    """One rank's file, open for a ``with`` block; raises :class:`TrainingError`."""

    def __init__(
        self, output: Path, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = output / FOLDER / f"rank-{rank}.jsonl"
        self._clock = clock
        self._lines: list[str] = []
        self._written = clock()

    def begin(self, step: int) -> None:
        """Keep what is there up to that step, and drop what comes after it, as it is done again."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(self._path, step) if step and self._path.exists() else []
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self._path)

    def add(self, figures: StepFigures) -> None:
        """Take one step's figures; they are written some seconds later."""
        times = {name: round(value, 6) for name, value in figures.seconds.items()}
        fields = {**figures._asdict(), "time": round(figures.time, 4), "seconds": times}
        self._lines.append(json.dumps(fields) + "\n")
        if self._clock() - self._written >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was taken."""
        self._written = self._clock()
        lines, self._lines = self._lines, []
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            raise TrainingError(f"{self._path} can't be written: {error.strerror}") from error

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
