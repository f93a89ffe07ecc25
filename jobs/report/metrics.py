"""What every rank wrote down of its steps: ``metrics/rank-N.jsonl``, a JSON object per step."""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("data", "forward", "backward", "communication", "optimizer")
"""What a step's seconds go to; communication is what was waited for beyond backward itself."""
_COLUMNS = ("time", "loss", "lr", "samples", "tokens", "padded")
_FOREVER_S = 1e12
_LARGEST = 1e18
_NAME = re.compile(r"rank-(\d+)\.jsonl")


def _column() -> array[float]:
    return array("d")


@dataclass
class Series:
    """One rank's steps as columns of equal length; what a step did not say is ``nan``.

    ``time`` is in seconds since the training began, ``parts`` in seconds by the names of PARTS,
    ``tokens`` without and ``padded`` with padding. ``unreadable`` counts lines that were left out.
    """

    rank: int
    step: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(
        default_factory=lambda: {name: _column() for name in _COLUMNS}
    )
    parts: dict[str, array[float]] = field(
        default_factory=lambda: {name: _column() for name in PARTS}
    )
    unreadable: int = 0
    repeated: int = 0
    """Steps that were done once more, from a checkpoint; the later ones count."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> array[float]:
        return self.columns[name]

    def total(self, name: str) -> float:
        """The sum of a column or part, without what is not known."""
        values = self.parts[name] if name in self.parts else self.columns[name]
        return math.fsum(value for value in values if math.isfinite(value))


def read_metrics(folder: Path) -> tuple[Series, ...]:
    """The ranks' steps, by rank; none where there is no such folder. Raises ``OSError``."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("rank-*.jsonl"))
    ranks = sorted((int(match[1]), path) for match, path in found if match)
    read = (_read_file(rank, path) for rank, path in ranks)
    return tuple(series for series in read if len(series) or series.unreadable)


def _read_file(rank: int, path: Path) -> Series:
    with path.open(encoding="utf-8", errors="replace") as lines:
        return parse_lines(rank, lines)


def parse_lines(rank: int, lines: Iterable[str]) -> Series:
    """A rank's steps from its file's lines.

    A run that was ended may have left half a line. One that was resumed goes back to its checkpoint:
    what came after it there is replaced, and its clock goes on where it was.
    """
    series, offset = Series(rank), 0.0
    for line in lines:
        if not line.strip():
            continue
        row = _read_row(line)
        if row is None:
            series.unreadable += 1
            continue
        if series.step and row["step"] <= series.step[-1]:
            _go_back(series, row["step"])
        time, known = _number(row.get("time")), series["time"]
        if known and time + offset < known[-1]:
            offset = known[-1]
        _append(series, row, time + offset)
    return series


def _read_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    fits = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**62
    return row if fits and 0 <= _number(row.get("time")) < _FOREVER_S else None


def _go_back(series: Series, step: int) -> None:
    first = bisect_left(series.step, step)
    series.repeated += len(series) - first
    del series.step[first:]
    for column in (*series.columns.values(), *series.parts.values()):
        del column[first:]


def _append(series: Series, row: dict[str, Any], time: float) -> None:
    seconds = row.get("seconds")
    parts = seconds if isinstance(seconds, dict) else {}
    series.step.append(row["step"])
    for name, column in series.columns.items():
        column.append(time if name == "time" else _number(row.get(name)))
    for name, column in series.parts.items():
        column.append(_number(parts.get(name)))


def _number(value: object) -> float:
    """The number, or ``nan`` for anything else, and for what is too large to be meant."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < _LARGEST else math.nan
