"""The grid of trials, and the choice of the best."""

from __future__ import annotations

import pytest

from infra.errors import UsageError
from jobs.experiments.tune import (
    Trial,
    TrialGrid,
    TrialResult,
    choose_best,
    estimate_minutes,
    plan_trials,
    suggest_ppn,
)
from provision.facts import HostFacts
from tests.jobs.places.topologies import machine

R7IZ = machine(32, smt=True)
OPEN = TrialGrid(None, None, (16,))


@pytest.mark.parametrize(
    ("nodes", "workers", "expected"),
    [
        ([R7IZ], 0, (1, 2, 4)),
        ([R7IZ] * 4, 1, (1, 2, 4)),
        ([machine(64, sockets=2, numa=2)], 1, (2, 1, 4, 8)),
        ([machine(32, numa=4)], 1, (4, 1, 8, 16)),
        ([machine(1)] * 2, 0, (1,)),
        ([machine(2)], 0, (1, 2)),
        # With a core for oneCCL two cores are enough for one rank only.
        ([machine(2)], 1, (1,)),
        ([machine(2), machine(1)], 0, (1,)),
        ([machine(6), machine(4)], 0, (1, 2)),
        # Nothing fits: the trial says why.
        ([machine(1)], 1, (1,)),
    ],
)
def test_ranks_per_node_that_suit_all_nodes(
    nodes: list[HostFacts], workers: int, expected: tuple[int, ...]
) -> None:
    assert suggest_ppn(nodes, workers) == expected


def test_every_combination_is_tried() -> None:
    grid = TrialGrid((1, 2), (1, 4), (8, 16))
    trials = plan_trials(grid, [R7IZ], "ccl")

    assert len(set(trials)) == 8
    assert trials[0] == Trial(1, 1, 8)
    assert trials[-1] == Trial(2, 4, 16)


def test_only_placement_varies_by_default() -> None:
    assert plan_trials(OPEN, [R7IZ], "gloo") == tuple(Trial(n, 0, 16) for n in (1, 2, 4))
    over_ccl = plan_trials(OPEN, [R7IZ], "ccl")
    assert {(t.nproc_per_node, t.ccl_workers) for t in over_ccl} == {
        (ppn, workers) for ppn in (1, 2, 4) for workers in (1, 2)
    }
    assert {trial.batch_size for trial in over_ccl} == {16}


def test_workers_without_oneccl_are_refused() -> None:
    with pytest.raises(UsageError, match="--ccl-workers: the backend is gloo, which has none"):
        plan_trials(TrialGrid(None, (1,), (16,)), [R7IZ], "gloo")


def test_too_many_trials_are_refused() -> None:
    grid = TrialGrid(tuple(range(1, 10)), (1, 2, 3, 4), (8, 16))
    with pytest.raises(UsageError, match="72 trials: expected at most 64"):
        plan_trials(grid, [R7IZ], "ccl")


def results(*speeds: float | None) -> dict[Trial, TrialResult]:
    return {
        Trial(ppn, 0, 16): TrialResult(ppn, 1, speed, failure="" if speed is not None else "why")
        for ppn, speed in enumerate(speeds, start=1)
    }


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ((10.0, 20.0, 15.0), 1),
        ((10.0, None, 9.0), 0),
        ((None, 5.0), 1),
        ((7.0, 7.0), 0),
        ((0.0, None), 0),
    ],
)
def test_the_fastest_is_the_best(speeds: tuple[float | None, ...], best: int) -> None:
    assert choose_best(results(*speeds)) == Trial(best + 1, 0, 16)


def test_no_trial_is_best_if_all_fail() -> None:
    assert choose_best(results(None)) is None


def test_the_estimate_counts_the_start_up() -> None:
    assert estimate_minutes(6, 20) == pytest.approx(5)
