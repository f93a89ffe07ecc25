"""Which trials `tune` makes, and which of them was the best. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from infra.errors import UsageError
from jobs.launch.cores import even_splits
from provision.facts import HostFacts

MOST_TRIALS = 64
START_UP_S = 30
"""About what a trial takes besides: ranks that start, load the model and read their texts."""


@dataclass(frozen=True)
class TrialGrid:
    """What to vary; ``None``: as the nodes suggest. ``batch_sizes`` are per rank."""

    ppn: tuple[int, ...] | None
    ccl_workers: tuple[int, ...] | None
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One way to place and feed the ranks; ``ccl_workers`` is 0 without oneCCL."""

    nproc_per_node: int
    ccl_workers: int
    batch_size: int

    def __str__(self) -> str:
        workers = f", {self.ccl_workers} oneCCL workers" if self.ccl_workers else ""
        return f"{self.nproc_per_node} per node{workers}, batch {self.batch_size}"


@dataclass(frozen=True)
class Outcome:
    """How a trial went: features a second of all ranks, or why it failed.

    ``threads`` are those with which a rank computes.
    """

    trial: Trial
    threads: int | None = None
    samples_per_second: float | None = None
    failure: str = ""


def plan_trials(grid: TrialGrid, facts: Iterable[HostFacts], backend: str) -> tuple[Trial, ...]:
    """Every combination, the nodes' own default first.

    Raises :class:`UsageError` for more than can be meant, and for workers without oneCCL.
    """
    workers = _workers(grid, backend)
    trials = tuple(
        Trial(ppn, count, batch)
        for ppn in grid.ppn or suggest_ppn(facts, min(workers))
        for count in workers
        for batch in grid.batch_sizes
    )
    if len(trials) > MOST_TRIALS:
        raise UsageError(
            f"{len(trials)} trials: expected at most {MOST_TRIALS}",
            hint="shorter lists: the trials are all combinations of them",
        )
    return trials


def _workers(grid: TrialGrid, backend: str) -> tuple[int, ...]:
    if backend == "ccl":
        return grid.ccl_workers or (1, 2)
    if grid.ccl_workers:
        raise UsageError(
            f"--ccl-workers: the backend is {backend}, which has none",
            hint="--backend ccl, on a stack that has it, or leave --ccl-workers out",
        )
    return (0,)


def suggest_ppn(facts: Iterable[HostFacts], workers: int) -> tuple[int, ...]:
    """Ranks per node: one per NUMA node as by default, then one in all, then twice and four times.

    Those alone that every node can share its cores among, with a core left to compute.
    """
    nodes = list(facts)
    numa = min(len(fact.numa_nodes) for fact in nodes)
    fitting = set.intersection(*(set(even_splits(fact)) for fact in nodes))
    cores = min(len(fact.physical_cores) for fact in nodes)
    wished = dict.fromkeys((numa, 1, 2 * numa, 4 * numa))
    return tuple(n for n in wished if n in fitting and cores // n > workers) or (1,)


def estimate_minutes(trials: int, seconds: float) -> float:
    """About how long the trials take, start-up included."""
    return trials * (seconds + START_UP_S) / 60


def choose_best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The fastest; of equal ones the first. ``None`` where all have failed."""
    measured = [outcome for outcome in outcomes if outcome.samples_per_second is not None]
    return max(measured, key=lambda outcome: outcome.samples_per_second or 0, default=None)


def as_row(outcome: Outcome) -> Mapping[str, object]:
    """An outcome for ``--json``."""
    trial = outcome.trial
    return {
        "ppn": trial.nproc_per_node,
        "ccl_workers": trial.ccl_workers,
        "threads": outcome.threads,
        "batch_size": trial.batch_size,
        "samples_per_second": outcome.samples_per_second,
        "failure": outcome.failure,
    }
