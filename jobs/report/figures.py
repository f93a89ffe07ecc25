"""What follows from a run's files: where the time went, how fast each rank was, what it cost. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES, PRICES_AS_OF
from jobs.experiments.published import EPOCH_S, MACHINE
from jobs.report.charts import Point
from jobs.report.folder import Run, as_number
from jobs.report.metrics import PARTS, Series

OTHER = "other"
EVALUATION = "evaluation"
PREPARATION = "preparation"
SAVING = "saving"
_PHASES = {
    "load": PREPARATION,
    "tokenize": PREPARATION,
    "evaluate": EVALUATION,
    "save": SAVING,
    "train": "training",
}


class Share(NamedTuple):
    """Seconds, and what they went to."""

    name: str
    seconds: float


def step_shares(series: Series) -> list[Share]:
    """One rank's training: its steps' parts, and what they leave of the time."""
    parts = [Share(name, series.total(name)) for name in PARTS]
    rest = (series["time"][-1] if len(series) else 0.0) - sum(part.seconds for part in parts)
    return [*parts, Share(OTHER, max(0.0, rest))]


def run_shares(run: Run) -> list[Share]:
    """The whole run by its phases, training split as its ranks did on average, in their order.

    Phases of other names keep them. Empty where the results name no phases.
    """
    phases = {name: seconds for name, seconds in run.seconds.items() if name != "total"}
    if not phases:
        return []
    shares: dict[str, float] = {}
    for name, seconds in phases.items():
        for part in _split(name, seconds, run.series):
            shares[part.name] = shares.get(part.name, 0.0) + part.seconds
    rest = run.seconds.get("total", 0.0) - sum(phases.values())
    shares[OTHER] = shares.get(OTHER, 0.0) + max(0.0, rest)
    return [Share(name, seconds) for name, seconds in shares.items()]


def _split(phase: str, seconds: float, series: Sequence[Series]) -> list[Share]:
    known = [each for each in series if len(each)]
    if phase != "train" or not known:
        return [Share(_PHASES.get(phase, phase), seconds)]
    parts = [Share(n, sum(each.total(n) for each in known) / len(known)) for n in PARTS]
    measured = sum(part.seconds for part in parts)
    # A clock of each step can't have seen more than the phase took; if so, shares are still right.
    scale = min(1.0, seconds / measured) if measured else 0.0
    scaled = [Share(part.name, part.seconds * scale) for part in parts]
    return [*scaled, Share(OTHER, seconds - sum(part.seconds for part in scaled))]


def rates(series: Series, column: str, bins: int) -> list[Point]:
    """A rank's samples or tokens per second over time, in so many equal parts of it.

    The sums are exact: a step that lies in two parts counts in both by its share.
    """
    times, values = series["time"], series[column]
    if len(times) == 0 or not any(math.isfinite(value) for value in values):
        return []
    done, total = [0.0], 0.0
    begin = 0.0 if series.step[0] <= 1 else times[0]
    ends = [begin, *times]
    for index, value in enumerate(values):
        # Of a rank that was resumed here the first step's beginning is not known.
        counts = math.isfinite(value) and not (index == 0 and begin > 0)
        total += value if counts else 0.0
        done.append(total)
    span = ends[-1] - begin
    if span <= 0:
        return []
    edges = [begin + span * index / bins for index in range(bins + 1)]
    sums = [_interpolate(ends, done, edge) for edge in edges]
    width = span / bins
    return [
        Point((edges[index] + edges[index + 1]) / 2, (sums[index + 1] - sums[index]) / width)
        for index in range(bins)
    ]


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    index = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left, right = xs[index - 1], xs[index]
    share = (x - left) / (right - left) if right > left else 1.0
    return ys[index - 1] + min(1.0, max(0.0, share)) * (ys[index] - ys[index - 1])


def tokens_per_second(run: Run) -> float | None:
    """Real tokens, all ranks together: the results' own figure, or from the ranks' steps."""
    told = run.number("tokens_per_second")
    if told is not None:
        return told
    sums = [
        series.total("tokens") / series["time"][-1]
        for series in run.series
        if len(series) and series["time"][-1] > 0
    ]
    return sum(sums) or None


def padding_share(run: Run) -> float | None:
    """How much of what was computed was padding, 0.0 to 1.0."""
    padded = sum(series.total("padded") for series in run.series)
    tokens = sum(series.total("tokens") for series in run.series)
    return 1 - tokens / padded if 0 < tokens <= padded else None


@dataclass(frozen=True)
class Price:
    """What the nodes cost together, in US dollars an hour, and where that is from."""

    usd_per_hour: float
    source: str


@dataclass(frozen=True)
class Cost:
    """US dollars. An epoch is its training alone; the run is the job from its start to its end.

    Neither counts the nodes' start and idle time, disks and traffic.
    """

    price: Price
    epoch_seconds: float | None
    epoch: float | None
    run: float | None


def find_price(run: Run, instance_type: str | None, usd_per_hour: float | None) -> Price | None:
    """The nodes' price: as given (a node's), or the catalogue's for the given or recorded types.

    Raises :class:`UsageError` where a price is given and nobody knows for how many nodes.
    """
    given = usd_per_hour is not None or instance_type is not None
    if given and not run.nodes:
        raise UsageError(
            "a price is given, but the folder does not tell how many nodes there were",
            hint=f"leave it out: {run.folder} has neither results.json nor job.json",
        )
    count = run.nodes or 0
    if usd_per_hour is not None:
        return Price(usd_per_hour * count, f"{count} × ${usd_per_hour:g}, as given")
    types = (instance_type,) * count if instance_type else run.instance_types
    if not types or any(name not in INSTANCE_TYPES for name in types):
        return None
    total = sum(INSTANCE_TYPES[name].usd_per_hour for name in types)
    each = ", ".join(f"{types.count(name)} × {name}" for name in dict.fromkeys(types))
    return Price(total, f"{each}, on demand, {PRICES_AS_OF}")


def reckon_cost(run: Run, price: Price) -> Cost:
    """What an epoch and the run cost at that price."""
    epoch = epoch_seconds(run)
    total = run.seconds.get("total")
    per_second = price.usd_per_hour / 3600
    return Cost(
        price,
        epoch,
        None if epoch is None else epoch * per_second,
        None if total is None else total * per_second,
    )


def epoch_seconds(run: Run) -> float | None:
    """How long one epoch trains at the run's speed."""
    features, speed = run.number("train_features"), run.number("samples_per_second")
    return features / speed if features and speed and speed > 0 else None


class Scale(NamedTuple):
    """How fast so many nodes were: samples a second."""

    nodes: int
    speed: float
    name: str


class Speedup(NamedTuple):
    """Against the fewest nodes; ``efficiency`` is 1.0 where twice the nodes do twice the work."""

    nodes: int
    speed: float
    speedup: float
    efficiency: float
    name: str


def run_scales(runs: Sequence[Run]) -> list[Scale]:
    """The speed of each run, and of each of the runs that a study lists."""
    found = []
    for run in runs:
        for row in run.study:
            found.append(
                (row.get("nodes"), row.get("samples_per_second"), row.get("name", "study"))
            )
        found.append((run.nodes, run.results.get("samples_per_second"), run.name))
    return [
        Scale(int(nodes), speed, str(name))
        for nodes_, speed_, name in found
        if (nodes := as_number(nodes_))
        and nodes >= 1
        and (speed := as_number(speed_))
        and speed > 0
    ]


def speedups(scales: Sequence[Scale]) -> list[Speedup]:
    """Each against the median of the fewest nodes' runs; none where all have the same size."""
    sizes = {scale.nodes for scale in scales}
    if len(sizes) < 2:
        return []
    fewest = min(sizes)
    base = median(scale.speed for scale in scales if scale.nodes == fewest)
    return [
        Speedup(n, speed, speed / base, speed / base * fewest / n, name)
        for n, speed, name in sorted(scales)
    ]


def published_costs() -> list[tuple[str, float, float]]:
    """The published runs: machines, seconds, and US dollars at the catalogue's price."""
    hourly = INSTANCE_TYPES[MACHINE].usd_per_hour
    return [(f"{n} × {MACHINE}", s, n * hourly * s / 3600) for n, s in EPOCH_S.items()]


def differences(runs: Sequence[Run]) -> list[str]:
    """What runs that are compared do not have in common, and should."""
    keys = ("model", "data", "train_features", "dtype", "backend", "batch_size_per_rank", "recipe")
    return [key for key in keys if len({str(run.results.get(key)) for run in runs}) > 1]
