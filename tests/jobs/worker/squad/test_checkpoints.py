from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from jobs.worker.runtime.errors import CheckpointError
from jobs.worker.squad.checkpoints import (
    EVERY_SECONDS,
    MOST_SHARE,
    WORTH_SECONDS,
    CheckpointTimer,
    RunIdentity,
    require_same,
)
from jobs.worker.squad.divergence import DivergenceDetector
from jobs.worker.squad.options import TrainOptions, parse_argv
from jobs.worker.squad.state import TrainingProgress
from tests.fakes import FakeClock


def test_progress_goes_through_json_unchanged() -> None:
    progress = TrainingProgress(
        7, 70, 900, 1.25, [(1, 0.1), (2, 1 / 3)], [(3, 0.5)], DivergenceDetector(0.2, 1 / 3, 4)
    )
    assert TrainingProgress.from_dict(json.loads(json.dumps(asdict(progress)))) == progress
    assert (
        TrainingProgress.from_dict(json.loads(json.dumps(asdict(TrainingProgress())))).watch.best
        == math.inf
    )


def test_a_checkpoint_by_steps_is_due_every_n_steps_and_at_the_end() -> None:
    due = CheckpointTimer(every=4, clock=FakeClock().monotonic)
    assert [step for step in range(1, 11) if due.by_step(step, last=step == 10)] == [4, 8, 10]
    assert not due.by_time(last=True)


def test_a_checkpoint_by_time_costs_at_most_a_small_share_of_it() -> None:
    clock = FakeClock()
    due = CheckpointTimer(every=None, clock=clock.monotonic)
    assert not due.by_step(1, last=True)
    assert not due.by_time(last=False), "time counts from the first question"
    clock.sleep(EVERY_SECONDS)
    assert due.by_time(last=False)
    due.saved(seconds=30)
    clock.sleep(EVERY_SECONDS)
    assert not due.by_time(last=False)
    clock.sleep(30 / MOST_SHARE - EVERY_SECONDS)
    assert due.by_time(last=False)


def test_the_end_of_a_short_run_is_not_worth_a_checkpoint() -> None:
    clock = FakeClock()
    due = CheckpointTimer(every=None, clock=clock.monotonic)
    assert not due.by_time(last=True)
    clock.sleep(WORTH_SECONDS)
    assert due.by_time(last=True)


OPTIONS = {"seed": 1, "learning_rate": 0.1, "batch_size": 8}
SAVED = RunIdentity(2, "fp32", "abc", OPTIONS, {"torch": "2.13", "threads per rank": "4"})


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (SAVED._replace(world_size=3), "the checkpoint has 2 ranks, this run 3"),
        (SAVED._replace(options={**OPTIONS, "seed": 2}), r"other options: --seed 2 \(it was 1\)"),
        (SAVED._replace(options={**OPTIONS, "new": 2}), r"--new 2 \(it was None\)"),
        (SAVED._replace(features="abd"), "the training data has changed"),
    ],
)
def test_another_run_is_refused(now: RunIdentity, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        require_same(SAVED, now)


def test_permitted_changes_are_reported_on_resume() -> None:
    assert require_same(SAVED, SAVED) == []
    now = SAVED._replace(dtype="bf16", options={**OPTIONS, "learning_rate": 0.01})
    assert require_same(SAVED, now) == [
        "--learning-rate 0.01 (it was 0.1)",
        "arithmetic in bf16 (it was fp32)",
    ]
    elsewhere = SAVED._replace(ground={"torch": "2.7", "threads per rank": "4", "new": "1"})
    assert require_same(SAVED, elsewhere) == ["torch 2.7 (it was 2.13)"]
    assert require_same(SAVED._replace(ground={}), SAVED) == [], "a checkpoint of before"


def test_the_options_travel_to_the_ranks() -> None:
    options = TrainOptions(checkpoint_every=7, keep_checkpoints=3, resume=True)
    assert parse_argv(options.to_argv()) == options
    with pytest.raises(ValueError, match="--keep-checkpoints 0 is out of range: 1 to 1000"):
        TrainOptions(keep_checkpoints=0)
