"""Figures computed from a run's files (time by part, speed by rank, scaling, cost), and their text. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from cluster.console.display import format_seconds
from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES, TABLE_DATE, TABLE_REGION
from jobs.report.charts import ChartPoint
from jobs.report.results_folder import PARTS, RankMetrics, Run, as_number
from jobs.worker.tasks import SCORES

EPOCH_S: Mapping[int, float] = {1: 26 * 60.0, 4: 7 * 60.0 + 30}
"""Seconds of the published runs, by number of nodes."""
PUBLISHED_SPEEDUPS = {nodes: EPOCH_S[1] / seconds for nodes, seconds in EPOCH_S.items()}
PUBLISHED = "DistilBERT, SQuAD v1.1"
MACHINE = "r7iz.metal-16xl"


def format_fact(value: object) -> str:
    """Format any value of a results file, shortened."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) < 10**15 else "?"
    text = "–" if value is None else str(value)
    return text if len(text) <= 500 else f"{text[:499]}…"


def format_number(value: float) -> str:
    """Format with four significant digits; a dash if the value is not finite."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def format_usd(value: float) -> str:
    """``$3.16``; small amounts with two significant digits."""
    return f"${value:,.2f}" if value >= 0.1 else f"${value:.2g}"


def format_costs(rows: Iterable[tuple[str, float, float | None]]) -> list[tuple[str, str, str]]:
    """Return names with their seconds and US dollars for display."""
    return [
        (name, format_seconds(seconds), "–" if usd is None else format_usd(usd))
        for name, seconds, usd in rows
    ]


def time_unit(span: float) -> tuple[float, str]:
    """Return the divisor for seconds on an axis up to ``span``, and the title of the unit."""
    if span < 180:
        return 1.0, "seconds of training"
    return (60.0, "minutes of training") if span < 10_800 else (3600.0, "hours of training")


OTHER = "other"
EVALUATION = "evaluation"
PREPARATION = "preparation"
SAVING = "saving"
_PHASES = {
    "load": PREPARATION,
    "tokenize": PREPARATION,
    "teacher": PREPARATION,
    "evaluate": EVALUATION,
    "save": SAVING,
    "train": "training",
}


Shares = dict[str, float]
"""Seconds by the part that they were spent on."""


def run_shares(run: Run) -> Shares:
    """Split the whole run by phase, and training by the ranks' average.

    Unknown phases keep their names. Empty if the results name no phases.
    """
    phases = {name: seconds for name, seconds in run.seconds.items() if name != "total"}
    shares: Shares = {}
    for name, seconds in phases.items():
        for part, part_s in split_phase(name, seconds, run.series).items():
            shares[part] = shares.get(part, 0.0) + part_s
    if phases:
        rest = run.seconds.get("total", 0.0) - sum(phases.values())
        shares[OTHER] = shares.get(OTHER, 0.0) + max(0.0, rest)
    return shares


def split_phase(phase: str, seconds: float, series: Sequence[RankMetrics]) -> Shares:
    """Split training by the parts of its steps; another phase is one part."""
    known = [each for each in series if len(each)]
    if phase != "train" or not known:
        return {_PHASES.get(phase, phase): seconds}
    parts = {name: sum(each.total(name) for each in known) / len(known) for name in PARTS}
    measured = sum(parts.values())
    # If the steps report more than the phase took, only their proportions are used.
    scale = min(1.0, seconds / measured) if measured else 0.0
    scaled = {name: part * scale for name, part in parts.items()}
    return {**scaled, OTHER: max(0.0, seconds - sum(scaled.values()))}  # not -0.0


def rates(series: RankMetrics, column: str, bins: int) -> list[ChartPoint]:
    """Return a rank's samples or tokens per second over time, in ``bins`` equal intervals.

    The sums are exact: a step that spans two intervals counts in both, proportionally.
    """
    times, values = series["time"], series[column]
    if len(times) == 0 or not any(math.isfinite(value) for value in values):
        return []
    # After a resume, the start of the first step is unknown, so it does not count.
    begin = 0.0 if series.step[0] <= 1 else times[0]
    ends = [begin, *times]
    span = ends[-1] - begin
    if span <= 0:
        return []
    done = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    edges = [begin + span * index / bins for index in range(bins + 1)]
    sums = [_interpolate(ends, done, edge) for edge in edges]
    parts = zip(pairwise(edges), pairwise(sums), strict=True)
    return [
        ChartPoint((a + b) / 2, (after - before) * bins / span) for (a, b), (before, after) in parts
    ]


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    index = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left, right = xs[index - 1], xs[index]
    share = (x - left) / (right - left) if right > left else 1.0
    return ys[index - 1] + min(1.0, max(0.0, share)) * (ys[index] - ys[index - 1])


def tokens_per_second(run: Run) -> float | None:
    """Return tokens per second of all ranks, excluding padding; from the results or the steps."""
    speed = run.number("tokens_per_second")
    if speed is not None:
        return speed
    sums = [
        series.total("tokens") / series["time"][-1]
        for series in run.series
        if len(series) and series["time"][-1] > 0
    ]
    return sum(sums) or None


def padding_share(run: Run) -> float | None:
    """Return the share of padding in the computed tokens, 0.0 to 1.0."""
    padded = sum(series.total("padded") for series in run.series)
    tokens = sum(series.total("tokens") for series in run.series)
    return 1 - tokens / padded if 0 < tokens <= padded else None


@dataclass(frozen=True)
class HourlyPrice:
    """Price of all nodes together in US dollars per hour, and its source."""

    usd_per_hour: float
    source: str

    def usd(self, seconds: float) -> float:
        """Return the price of so many seconds."""
        return self.usd_per_hour * seconds / 3600


def find_price(
    run: Run, instance_type: str | None, usd_per_hour: float | None
) -> HourlyPrice | None:
    """Return the price: as given per node, else as recorded with the job, else the table's.

    Raises :class:`UsageError` if a price is given and the number of nodes is unknown.
    """
    given = usd_per_hour is not None or instance_type is not None
    if given and not run.nodes:
        raise UsageError(
            "a price needs the number of nodes, which the folder does not contain",
            hint=f"omit the price: {run.folder} has neither results.json nor job.json",
        )
    count, recorded = run.nodes or 0, as_number(run.job.get("usd_per_hour"))
    part = as_number(run.job.get("node_share")) or 1.0  # less with `--cores`
    share = f", {part:.1%} of it by cores" if part < 1 else ""
    if usd_per_hour is not None:
        source = f"{count} × ${usd_per_hour:g}, as given{share}"
        return HourlyPrice(usd_per_hour * count * part, source)
    types = (instance_type,) * count if instance_type else run.instance_types
    each = ", ".join(f"{types.count(name)} × {name}" for name in dict.fromkeys(types))
    if types and not instance_type and recorded and recorded > 0:
        source = f"{run.job.get('market', 'on demand')}, with disk and address, {run.job.get('price_source')}"
        return HourlyPrice(recorded * len(types) * part, f"{each}{share}, {source}")
    listed = [INSTANCE_TYPES[name].table_usd for name in types if name in INSTANCE_TYPES]
    known = [usd for usd in listed if usd is not None]
    if not types or len(known) < len(types):
        return None
    region = run.job.get("region") or TABLE_REGION
    elsewhere = "" if region == TABLE_REGION else f"; the price in {region} is unknown"
    return HourlyPrice(
        sum(known) * part,
        f"{each}{share}, on demand, table of {TABLE_DATE}, {TABLE_REGION}{elsewhere}",
    )


def scores(run: Run) -> dict[str, float]:
    """Return a run's evaluation scores by name, in percent."""
    found = run.results.get("scores", run.results)
    known = found if isinstance(found, dict) else {}
    names = SCORES if found is run.results else known
    values = {name: as_number(known.get(name)) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def epoch_seconds(run: Run) -> float | None:
    """Return the training time of one epoch at the run's speed."""
    if run.trials:
        return None
    samples = run.number("train_samples")
    speed = run.number("samples_per_second")
    return samples / speed if samples and speed and speed > 0 else None


class Speedup(NamedTuple):
    """A run's speed in samples per second, and relative to the fewest nodes; ``efficiency`` 1.0 is linear."""

    nodes: int
    speed: float
    speedup: float
    efficiency: float
    name: str


def speedups(runs: Sequence[Run]) -> list[Speedup]:
    """Compare each run with the median of the runs on the fewest nodes; empty if all have the same size."""
    # The speed of a study is that of one trial.
    speeds = sorted(
        (run.nodes, speed, run.name)
        for run in runs
        if run.nodes and not run.trials and (speed := run.number("samples_per_second") or 0) > 0
    )
    if len({nodes for nodes, _, _ in speeds}) < 2:
        return []
    fewest = speeds[0][0]
    base = median(speed for nodes, speed, _ in speeds if nodes == fewest)
    return [
        Speedup(nodes, speed, speed / base, speed / base * fewest / nodes, name)
        for nodes, speed, name in speeds
    ]


def is_like_published(run: Run) -> bool:
    """Return whether a run is of the published runs' task."""
    return run.text("task") == "squad" or run.text("recipe") == "reference"


def published_costs() -> list[tuple[str, float, float]]:
    """Return the published runs: machines, seconds, and US dollars at the catalog's price."""
    hourly = INSTANCE_TYPES[MACHINE].table_usd or 0.0
    return [(f"{n} × {MACHINE}", s, n * hourly * s / 3600) for n, s in EPOCH_S.items()]


def differences(runs: Sequence[Run]) -> list[str]:
    """Return the settings that differ between compared runs."""
    keys = ("model", "data", "train_samples", "dtype", "backend", "batch_size_per_rank", "recipe")
    return [key for key in keys if len({str(run.results.get(key)) for run in runs}) > 1]
