"""The grid of trials that `tune` runs, and the choice of the fastest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infra.errors import UsageError
from jobs.launchers.cores import even_splits
from jobs.launchers.placement import no_ccl_workers
from provision.facts import HostFacts

MAX_TRIALS = 64
START_UP_S = 30
"""Approximate start-up of a trial: ranks start, load the model, and read the data."""


@dataclass(frozen=True)
class TrialGrid:
    """What to vary; ``None`` uses what suits the nodes. ``batch_sizes`` are per rank."""

    ppn: tuple[int, ...] | None
    ccl_workers: tuple[int, ...] | None
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One placement and batch size of the ranks; ``ccl_workers`` is 0 without oneCCL."""

    nproc_per_node: int
    ccl_workers: int
    batch_size: int

    def __str__(self) -> str:
        workers = f", {self.ccl_workers} oneCCL workers" if self.ccl_workers else ""
        return f"{self.nproc_per_node} per node{workers}, batch {self.batch_size}"


@dataclass(frozen=True)
class TrialResult:
    """The speed of a trial: features per second of all ranks and seconds per step, or why it failed.

    ``nproc_per_node`` is the number of ranks per node, ``threads`` that of a rank's computing threads,
    ``gradient_bytes`` what a rank exchanges per step.
    """

    nproc_per_node: int | None = None
    threads: int | None = None
    samples_per_second: float | None = None
    step_s: float | None = None
    gradient_bytes: int = 0
    failure: str = ""


def plan_trials(grid: TrialGrid, facts: Iterable[HostFacts], backend: str) -> tuple[Trial, ...]:
    """Return every combination, the nodes' default first.

    Raises :class:`UsageError` for more than :data:`MAX_TRIALS`, and for workers without oneCCL.
    """
    workers = _workers(grid, backend)
    trials = tuple(
        Trial(ppn, count, batch)
        for ppn in grid.ppn or suggest_ppn(facts, min(workers))
        for count in workers
        for batch in grid.batch_sizes
    )
    if len(trials) > MAX_TRIALS:
        raise UsageError(
            f"{len(trials)} trials: expected at most {MAX_TRIALS}",
            hint="give shorter lists: the trials are all combinations of them",
        )
    return trials


def _workers(grid: TrialGrid, backend: str) -> tuple[int, ...]:
    if backend == "ccl":
        return grid.ccl_workers or (1, 2)
    if grid.ccl_workers:
        raise no_ccl_workers(backend)
    return (0,)


def suggest_ppn(facts: Iterable[HostFacts], workers: int) -> tuple[int, ...]:
    """Return ranks per node to try: one per NUMA node (the default), one in all, two and four per NUMA node.

    Only numbers that divide every node's cores evenly and leave a core to compute.
    """
    nodes = list(facts)
    numa = min(len(fact.numa_nodes) for fact in nodes)
    fitting = set.intersection(*(set(even_splits(fact)) for fact in nodes))
    cores = min(len(fact.physical_cores) for fact in nodes)
    candidates = dict.fromkeys((numa, 1, 2 * numa, 4 * numa))
    return tuple(n for n in candidates if n in fitting and cores // n > workers) or (1,)


def estimate_minutes(trials: int, seconds: float) -> float:
    """Return about how long the trials take, including start-up."""
    return trials * (seconds + START_UP_S) / 60


def choose_best(results: Mapping[Trial, TrialResult]) -> Trial | None:
    """Return the fastest trial, the first of equal ones; ``None`` if all failed."""
    speeds = {
        t: r.samples_per_second for t, r in results.items() if r.samples_per_second is not None
    }
    return max(speeds, key=lambda trial: speeds[trial], default=None)


def as_row(trial: Trial, result: TrialResult) -> Mapping[str, object]:
    """Return a trial and its result for ``--json``."""
    return {
        "ppn": trial.nproc_per_node,
        "ccl_workers": trial.ccl_workers,
        "threads": result.threads,
        "batch_size": trial.batch_size,
        "samples_per_second": result.samples_per_second,
        "failure": result.failure,
    }
