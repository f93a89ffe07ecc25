"""Metrics of each rank's steps: ``metrics/rank-N.jsonl``, one JSON object per step."""

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

from infra.files import read_lines

PARTS = ("data", "forward", "backward", "communication", "optimizer")
"""Parts of a step's time; communication is the wait beyond the backward pass."""
_COLUMNS = ("time", "loss", "lr", "samples", "tokens", "padded")
_MAX_BYTES = 1 << 30
"""Millions of steps."""
_FOREVER_S = 1e12
_LARGEST = 1e18
_NAME = re.compile(r"rank-(\d+)\.jsonl")


def _column() -> array[float]:
    return array("d")


@dataclass
class RankMetrics:
    """One rank's steps as columns of equal length; missing values are ``nan``.

    ``time`` is in seconds since training started, ``parts`` in seconds by the names of PARTS;
    ``tokens`` excludes padding, ``padded`` includes it. ``unreadable`` counts skipped lines.
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
    """Steps repeated after a resume; only the later ones are kept."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> array[float]:
        return self.columns[name]

    def total(self, name: str) -> float:
        """Return the sum of a column or part, ignoring missing values."""
        values = self.parts[name] if name in self.parts else self.columns[name]
        return math.fsum(value for value in values if math.isfinite(value))


def read_metrics(folder: Path) -> tuple[RankMetrics, ...]:
    """Read all ranks' metrics, in rank order; empty without the folder. Raises :class:`UsageError`."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("rank-*.jsonl"))
    ranks = sorted((int(match[1]), path) for match, path in found if match)
    read = (_read_file(rank, path) for rank, path in ranks)
    return tuple(series for series in read if len(series) or series.unreadable)


def _read_file(rank: int, path: Path) -> RankMetrics:
    return parse_lines(rank, read_lines(path, _MAX_BYTES))


def parse_lines(rank: int, lines: Iterable[str]) -> RankMetrics:
    """Parse a rank's file.

    A stopped run may leave an incomplete line. A resumed run repeats the steps after its checkpoint:
    they replace the earlier ones, and the time continues where it was.
    """
    series, offset = RankMetrics(rank), 0.0
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


def _go_back(series: RankMetrics, step: int) -> None:
    first = bisect_left(series.step, step)
    series.repeated += len(series) - first
    del series.step[first:]
    for column in (*series.columns.values(), *series.parts.values()):
        del column[first:]


def _append(series: RankMetrics, row: dict[str, Any], time: float) -> None:
    seconds = row.get("seconds")
    parts = seconds if isinstance(seconds, dict) else {}
    series.step.append(row["step"])
    for name, column in series.columns.items():
        column.append(time if name == "time" else _number(row.get(name)))
    for name, column in series.parts.items():
        column.append(_number(parts.get(name)))


def _number(value: object) -> float:
    """Return the number, or ``nan`` for anything else and for implausibly large numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < _LARGEST else math.nan
