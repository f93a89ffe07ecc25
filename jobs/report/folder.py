"""A results folder as a run: ``results.json``, ``metrics/``, ``job.json``, each if it is there.

The files may come from anywhere and any version: what is missing or of another type is not known,
and the report says so instead of guessing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from jobs.report.metrics import Series, read_metrics

RESULTS, METRICS, JOB, STUDY = "results.json", "metrics", "job.json", "scaling.json"
_HINT = "a folder that `spr-cluster train` or `spr-cluster fetch` has filled"


@dataclass(frozen=True)
class Run:
    """One run, as far as its files tell. ``results`` and ``job`` are empty where there is no file."""

    folder: Path
    results: Mapping[str, Any]
    series: tuple[Series, ...]
    job: Mapping[str, Any]
    study: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        """What each rank said of itself, see :class:`jobs.worker.squad.results.RankFacts`."""
        return [rank for rank in _list(self.results.get("ranks")) if isinstance(rank, dict)]

    @property
    def nodes(self) -> int | None:
        """How many machines it ran on."""
        named = _list(self.job.get("nodes"))
        return len({str(rank.get("hostname")) for rank in self.ranks}) or len(named) or None

    def number(self, key: str) -> float | None:
        """A figure of the results; ``None`` where it is not there, or not a number."""
        return as_number(self.results.get(key))

    def text(self, key: str) -> str | None:
        value = self.results.get(key)
        return value if isinstance(value, str) and value else None

    @property
    def seconds(self) -> dict[str, float]:
        """Those of each phase, and ``total``."""
        phases = self.results.get("seconds")
        known = phases.items() if isinstance(phases, dict) else ()
        return {str(k): n for k, v in known if (n := as_number(v)) is not None and n >= 0}

    @property
    def loss_curve(self) -> list[tuple[float, float]]:
        """Steps with their losses, ``nan`` where the loss is not a number."""
        pairs = (p for p in _list(self.results.get("loss_curve")) if isinstance(p, list))
        read = [(as_number(p[0]), as_number(p[1])) for p in pairs if len(p) == 2]
        return sorted((x, math.nan if y is None else y) for x, y in read if x is not None)

    @property
    def cloud(self) -> str | None:
        """Where the nodes were, ``aws`` or ``local``, from ``job.json``."""
        more = self.job.get("more")
        told = self.job.get("cloud") or (more.get("cloud") if isinstance(more, dict) else None)
        return told if isinstance(told, str) else None

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The nodes' EC2 types, from ``job.json``; none unless it says that AWS had them.

        The embedded cloud's containers have types, too, and cost nothing.
        """
        if self.cloud != "aws":
            return ()
        nodes = (node for node in _list(self.job.get("nodes")) if isinstance(node, dict))
        return tuple(node["type"] for node in nodes if isinstance(node.get("type"), str))


def read_run(folder: Path) -> Run:
    """Read a results folder; raises :class:`UsageError` for one that can't be a run's."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", hint=_HINT)
    try:
        results, job = _read_object(folder / RESULTS), _read_object(folder / JOB)
        series = read_metrics(folder / METRICS)
        study = _read_object(folder / STUDY)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: can't be read: {error.strerror}") from None
    points = [p for p in _list(study.get("runs")) if isinstance(p, dict)]
    if not results and not series and not points:
        raise UsageError(
            f"{folder}: neither {RESULTS} nor {METRICS}/rank-0.jsonl in it", hint=_HINT
        )
    return Run(folder, results, series, job, points)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; an empty one where there is no such file."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{path}: is not JSON: {error.msg} ({where})") from None
    except (RecursionError, ValueError):  # nested too deeply; a number of thousands of digits
        raise UsageError(f"{path}: is no file of ours") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return content


def as_number(value: object) -> float | None:
    """A number of a size that can be meant, or ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e18 else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def newest_results(root: Path) -> Path | None:
    """The folder below ``root`` whose results or metrics are the newest."""
    marks = [*root.glob(f"*/{RESULTS}"), *root.glob(f"*/{METRICS}")]
    newest = max(marks, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


def find_folder(wish: str | None) -> Path:
    """A folder by its path, or by its job's id below ``results/``; without a wish the newest there.

    Raises :class:`UsageError` where there is none.
    """
    root = Path("results")
    if wish is None:
        newest = newest_results(root)
        if newest is None:
            raise UsageError("no results in ./results", hint="name their folder, or train first")
        return newest
    path = Path(wish)
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{wish} is a file: expected {_HINT}")
    below = root / wish
    if below.is_dir() and below.resolve().is_relative_to(root.resolve()):
        return below
    raise UsageError(
        f"{wish}: no such folder, and none in ./results",
        hint=f"spr-cluster fetch {wish}" if "/" not in wish and wish.isprintable() else _HINT,
    )
