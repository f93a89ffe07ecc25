"""A run's folder: ``results.json``, ``job.json``, and each rank's ``metrics/rank-N.jsonl``, each optional.

The files may be of any origin and version. Missing values and values of another type count as unknown.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.files import read_lines, read_object
from jobs.places.plan import own_folder
from jobs.places.record import has_own_results, read_results

PARTS = ("data", "forward", "backward", "communication", "optimizer")
"""Parts of a step's time; communication is the wait beyond the backward pass."""
_COLUMNS = ("time", "loss", "lr", "samples", "tokens", "padded")
_MAX_BYTES = 1 << 30
"""Millions of steps."""
_FOREVER_S = 1e12
_NAME = re.compile(r"rank-(\d+)\.jsonl")


@dataclass
class RankMetrics:
    """One rank's steps as columns of equal length; missing values are ``nan``.

    ``time`` is in seconds since training started, as are PARTS of each step; ``tokens`` excludes padding,
    ``padded`` includes it. ``unreadable`` counts skipped lines.
    """

    rank: int
    step: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in (*_COLUMNS, *PARTS)}
    )
    unreadable: int = 0
    repeated: int = 0
    """Steps repeated after a resume; only the later ones are kept."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> array[float]:
        return self.columns[name]

    def total(self, name: str) -> float:
        """Return the sum of a column, ignoring missing values."""
        return math.fsum(filter(math.isfinite, self.columns[name]))


def read_metrics(folder: Path, size: float | None = None) -> tuple[RankMetrics, ...]:
    """Read all ranks' metrics, in rank order; empty without the folder. Raises :class:`UsageError`.

    ``size`` is the number of ranks: a run may have begun on more, whose files are left.
    """
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("rank-*.jsonl"))
    ranks = sorted((int(match[1]), path) for match, path in found if match)
    ranks = [each for each in ranks if not size or each[0] < size]
    read = (parse_lines(rank, read_lines(path, _MAX_BYTES)) for rank, path in ranks)
    return tuple(series for series in read if len(series) or series.unreadable)


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
    for column in series.columns.values():
        del column[first:]


def _append(series: RankMetrics, row: dict[str, Any], time: float) -> None:
    seconds = row.get("seconds")
    values = {**row, **(seconds if isinstance(seconds, dict) else {}), "time": time}
    series.step.append(row["step"])
    for name, column in series.columns.items():
        column.append(_number(values.get(name)))


def _number(value: object) -> float:
    """Return the number, or ``nan`` for anything else and for implausibly large numbers."""
    found = as_number(value)
    return math.nan if found is None else found


RESULTS, METRICS, JOB = "results.json", "metrics", "job.json"
_HINT = "a folder that `spr-cluster train` or `spr-cluster fetch` has filled"


@dataclass(frozen=True)
class Run:
    """One run, read from its files. ``results`` and ``job`` are empty if their file is missing."""

    folder: Path
    results: Mapping[str, Any]
    series: tuple[RankMetrics, ...]
    job: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        """The ranks' reports, see :class:`jobs.worker.runtime.context.RankFacts`."""
        return [rank for rank in as_list(self.results.get("ranks")) if isinstance(rank, dict)]

    @property
    def recorded_nodes(self) -> list[Any]:
        """The nodes in ``job.json``."""
        return as_list(self.job.get("nodes"))

    @property
    def nodes(self) -> int | None:
        """Number of nodes, also of those on which a study ran no trial."""
        recorded = len(self.recorded_nodes)
        if self.trials:
            return recorded or len({str(each.get("host")) for each in self.trials})
        return len({str(rank.get("hostname")) for rank in self.ranks}) or recorded or None

    def number(self, key: str) -> float | None:
        """Return a number of the results; ``None`` if it is missing or not a number."""
        return as_number(self.results.get(key))

    def text(self, key: str) -> str | None:
        value = self.results.get(key)
        return value if isinstance(value, str) and value else None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and ``total``."""
        phases = self.results.get("seconds")
        known = phases.items() if isinstance(phases, dict) else ()
        return {str(k): n for k, v in known if (n := as_number(v)) is not None and n >= 0}

    @property
    def loss_curve(self) -> list[tuple[float, float]]:
        """Steps and losses; ``nan`` if a loss is not a number."""
        return read_pairs(self.results.get("loss_curve"))

    @property
    def evaluations(self) -> list[tuple[float, dict[str, float]]]:
        """Steps, and the scores after them by name, without values that are no numbers."""
        rows = [each for each in as_list(self.results.get("evaluations")) if isinstance(each, dict)]
        read = [{k: n for k, v in each.items() if (n := as_number(v)) is not None} for each in rows]
        return [(each.pop("step"), each) for each in read if "step" in each]

    @property
    def trials(self) -> list[Mapping[str, Any]]:
        """The trials of a study, with their options and scores."""
        return [each for each in as_list(self.results.get("trials")) if isinstance(each, dict)]

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The nodes' EC2 types, from ``job.json``; empty unless they ran on AWS.

        The embedded cloud's containers also have types, but cost nothing.
        """
        if self.job.get("cloud") != "aws":
            return ()
        nodes = (node for node in self.recorded_nodes if isinstance(node, dict))
        return tuple(node["type"] for node in nodes if isinstance(node.get("type"), str))


def read_run(folder: Path) -> Run:
    """Read a results folder. Raises :class:`UsageError` if it is not one."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", hint=_HINT)
    own = own_folder(folder)
    job = read_record(folder).job
    results = read_results(folder, job)
    series = read_metrics(own / METRICS, as_number(results.get("world_size")))
    if not results and not series:
        raise UsageError(
            f"{folder}: contains neither {RESULTS} nor {own.name}/{METRICS}/rank-0.jsonl",
            hint=_HINT,
        )
    return Run(folder, results, series, job)


def read_record(folder: Path) -> Run:
    """Read only ``job.json``, if there is one. Raises :class:`UsageError`."""
    return Run(folder, {}, (), read_object(own_folder(folder) / JOB, optional=True))


def as_number(value: object) -> float | None:
    """Return a number of plausible size, or ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e18 else None


def read_pairs(value: object) -> list[tuple[float, float]]:
    """Return pairs of numbers by the first; ``nan`` for a second that is not a number."""
    pairs = (pair for pair in as_list(value) if isinstance(pair, list) and len(pair) == 2)
    read = [(as_number(x), as_number(y)) for x, y in pairs]
    return sorted((x, math.nan if y is None else y) for x, y in read if x is not None)


def as_list(value: object) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def _find_newest(root: Path) -> Path:
    """Return the folder below ``root`` with the newest results or metrics."""
    ours = (path for path in root.glob(f"*/{RESULTS}") if not _is_program(path.parent))
    marks = [*ours, *root.glob(str(own_folder(Path("*")) / METRICS))]
    if not marks:
        raise UsageError("no results in ./results", hint="name a results folder, or train first")
    newest = max(marks, key=lambda path: path.stat().st_mtime)
    return root / newest.relative_to(root).parts[0]


def _is_program(folder: Path) -> bool:
    with suppress(UsageError):
        return not has_own_results(read_record(folder).job)
    return False


def find_folder(name: str | None) -> Path:
    """Return a folder by path or by job ID below ``results/``; without a name, the newest one there.

    Raises :class:`UsageError` if there is none.
    """
    root = Path("results")
    if name is None:
        return _find_newest(root)
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{name} is a file: expected {_HINT}")
    below = root / name
    if below.is_dir() and below.resolve().is_relative_to(root.resolve()):
        return below
    raise UsageError(
        f"{name}: no such folder, and none in ./results",
        hint=f"spr-cluster fetch {name}" if "/" not in name and name.isprintable() else _HINT,
    )
