"""Speed trials: their length, their features, and that they only measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jobs.worker.tasks.squad.task import DEMO
from jobs.worker.training import trial
from jobs.worker.training.trial import enough_for_trial, plan_measure
from tests.jobs.worker.threaded_ranks import Table, ThreadedRank, session
from tests.jobs.worker.training.test_batches import epoch_batches
from tests.jobs.worker.training.test_run import run_ranks, small

TRIAL = replace(DEMO, batch_size=4, trial_seconds=5)


def test_a_trial_reads_part_of_many_records_and_the_training_itself_all() -> None:
    everything, few = [*range(5000)], [*range(10)]
    some = enough_for_trial(TRIAL, everything, 2)

    assert len(some) == 50 * 4 * 2
    assert some == enough_for_trial(TRIAL, everything, 2), "the same on every rank"
    assert len({*some}) == len(some)
    assert enough_for_trial(replace(TRIAL, trial_seconds=None), everything, 2) is everything
    assert enough_for_trial(TRIAL, few, 2) is few


@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (2, 4), (4, 8)])
def test_a_short_trial_takes_whole_epochs_of_texts_of_every_length(ranks: int, batch: int) -> None:
    options = replace(TRIAL, batch_size=batch)
    lengths = np.resize(np.arange(10, 50, dtype=np.int32), 4000)

    chosen, schedule = plan_measure(len(lengths), options, ranks, 10)

    assert (schedule.per_epoch, schedule.total) == (10, 10)
    assert len(chosen) == 10 * batch * ranks
    taken = [
        index
        for rank in range(ranks)
        for piece in epoch_batches(lengths[chosen], batch, rank, ranks, (1,))
        for index in piece
    ]
    assert sorted(taken) == list(range(len(chosen))), "every one of them, once"
    middle = float(np.mean(lengths[chosen]))
    assert middle == pytest.approx(float(np.mean(lengths)), rel=0.2)


@pytest.mark.parametrize(("steps", "total"), [(12, 14), (14, 14), (7, 7), (30, 35)])
def test_a_long_trial_repeats_its_features(steps: int, total: int) -> None:
    chosen, schedule = plan_measure(28, TRIAL, 1, steps)

    assert chosen.tolist() == list(range(28))
    assert (schedule.per_epoch, schedule.total) == (7, total)


@pytest.mark.parametrize(
    ("changes", "compiled", "of_real_run", "taken"),
    [
        ({"epochs": 3}, 0, 3 * 250, 2 + 2 + 2000),
        ({"epochs": 3}, 6, 3 * 250, 6 + 2 + 2000),
        ({"max_steps": 3}, 0, 3, 2 + 2 + 3),
        ({"max_steps": 7}, 6, 7, 6 + 2 + 7),
    ],
)
def test_a_trial_compiles_as_the_real_run_and_ends_after_max_steps(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    compiled: int,
    of_real_run: int,
    taken: int,
) -> None:
    prepared, steps = list[int](), list[int]()

    def prepare(_: object, steps: int) -> tuple[None, None]:
        prepared.append(steps)
        return None, None

    monkeypatch.setattr(trial, "prepare", prepare)
    monkeypatch.setattr(trial, "take_step", lambda *each: steps.append(each[3]))
    monkeypatch.setattr(trial, "count_compiled", lambda _: compiled)
    run: Any = SimpleNamespace(
        context=session(replace(TRIAL, **changes), ThreadedRank(table=Table(1), rounds=[])),
        samples=range(40),
        lengths=np.full(40, 9, dtype=np.int32),
        loaded=SimpleNamespace(model=None),
        batch=len,
    )

    speed = trial.measure_speed(run, 1e9, records=1000)

    assert prepared == [of_real_run]
    assert (len(steps), set(steps), speed.steps) == (taken, {4}, taken - 2 - (compiled or 2))


def test_two_ranks_measure_their_training_and_leave_nothing(nodes_folder: Path) -> None:
    options = replace(small(nodes_folder, "out", batch_size=4), trial_seconds=1)

    first, second = run_ranks(nodes_folder, [options] * 2)

    assert (first.code, second.code) == (0, 0), first.output + second.output
    (speed,) = first.of("trial")
    assert speed["samples_per_second"] > 0
    # 16 questions for two ranks with four each: two steps an epoch.
    assert speed["steps"] % 2 == 0
    assert speed["samples_per_second"] == pytest.approx(
        speed["steps"] * 8 / speed["seconds"], rel=0.01
    )
    assert [event["name"] for event in first.of("phase")] == ["load", "tokenize", "measure"]
    assert not first.of("result")
    assert not (nodes_folder / "out").exists()
