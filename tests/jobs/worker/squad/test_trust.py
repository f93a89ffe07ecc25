"""The parts by which a run watches itself: its loss, its pace, its time, its figures."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from jobs.worker.runtime.errors import CheckpointError, StoppedError, TrainingError
from jobs.worker.runtime.metrics import FLUSH_SECONDS, Metrics, StepFigures
from jobs.worker.runtime.pace import Pace, RankReport, host_shares, steps_until_next
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.runtime.stopping import listen
from jobs.worker.squad.checkpoints import (
    EVERY_SECONDS,
    MOST_SHARE,
    WORTH_SECONDS,
    CheckpointTimer,
    RunIdentity,
    require_same,
)
from jobs.worker.squad.divergence import PATIENCE, DivergenceDetector
from jobs.worker.squad.options import TrainOptions, parse_argv
from jobs.worker.squad.state import TrainingProgress
from tests.fakes import FakeClock


def watched(*losses: float) -> DivergenceDetector:
    watch = DivergenceDetector()
    for loss in losses:
        watch.see(loss)
    return watch


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([5.9] * 300, False),
        ([6 - 5 * n / 500 for n in range(500)], False),
        # By heart, and a peak now and then: far above it in parts, and nothing is wrong.
        ([0.01] * 200 + [1.5] * 300, False),
        ([1.2] * 200 + [8.0] * 60 + [1.2] * 200, False),
        # Back at chance.
        ([1.2] * 200 + [5.9] * 160, True),
        ([5.9] * 20 + [40.0] * 110, True),
    ],
    ids=["learns nothing", "learns", "by heart", "peak", "forgets all", "explodes"],
)
def test_divergence_is_a_level_that_is_far_too_high_for_long(
    losses: list[float], diverged: bool
) -> None:
    watch, seen = DivergenceDetector(), False
    for loss in losses:
        watch.see(loss)
        seen = seen or watch.diverged
    assert seen is diverged


def test_what_is_suspicious_is_known_long_before_it_is_certain() -> None:
    watch = watched(*[1.0] * 50, *[20.0] * 10)
    assert watch.suspicious
    assert not watch.diverged
    assert watch.high < PATIENCE


def test_progress_goes_through_json_unchanged() -> None:
    progress = TrainingProgress(
        7, 70, 900, 1.25, [(1, 0.1), (2, 1 / 3)], [(3, 0.5)], watched(0.1, 1 / 3)
    )
    assert TrainingProgress.from_dict(json.loads(json.dumps(asdict(progress)))) == progress
    assert (
        TrainingProgress.from_dict(json.loads(json.dumps(asdict(TrainingProgress())))).watch.best
        == math.inf
    )


def test_a_checkpoint_by_steps_is_due_after_them_and_at_the_end() -> None:
    due = CheckpointTimer(every=4, clock=FakeClock().monotonic)
    assert [step for step in range(1, 11) if due.by_step(step, last=step == 10)] == [4, 8, 10]
    assert not due.by_time(last=True)


def test_a_checkpoint_by_time_costs_a_small_part_of_it_at_most() -> None:
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


def test_shares_are_of_the_power_not_of_the_waiting() -> None:
    def said(tokens: int, busy: float) -> RankReport:
        return RankReport(tokens, busy, False, False, 1)

    # Each did as much; node b needed three times as long for it, and a has two ranks.
    shares = host_shares(["a", "a", "b"], [said(90, 1.0), said(90, 1.0), said(90, 3.0)])
    assert shares == {"a": pytest.approx(6 / 7, abs=1e-3), "b": pytest.approx(1 / 7, abs=1e-3)}


@pytest.mark.parametrize(("one", "steps"), [(0.0, 1000), (0.01, 100), (0.4, 2), (5.0, 1)])
def test_messages_are_about_a_second_apart(one: float, steps: int) -> None:
    assert steps_until_next(one) == steps


@dataclass
class TwoRanks:
    """This rank, and another that says something of its own."""

    other: RankReport
    heard: list[RankReport] = field(default_factory=list)

    def gather(self, value: RankReport) -> list[RankReport]:
        self.heard.append(value)
        return [value, self.other]


def test_one_ranks_wish_to_stop_is_everyones_and_rank_0_says_when_to_save() -> None:
    clock = FakeClock()
    ranks = TwoRanks(RankReport(tokens=50, busy=1.0, stop=True, save=True, next_in=77))
    pace = Pace(cast(Ranks, ranks), ["a", "b"], clock.monotonic)
    pace.begin(10, samples=100, tokens=1000)
    assert pace.next_talk == 11
    clock.sleep(0.5)
    pace.count(tokens=150, busy=0.4)

    agreed = pace.talk(11, stop=False, save=False)

    assert agreed == (200, True, False)
    assert pace.next_talk == 13
    pace.mark(11, 108, 1200)
    assert pace.speed(total=21) == (16.0, 400.0, 5.0)
    pace.talk(13, stop=False, save=False)
    assert ranks.heard[-1].tokens == 0, "counted once"


def figures(step: int) -> StepFigures:
    return StepFigures(step, step / 2, 1 / 3, 1e-4, 4, 90, 96, {"data": 1e-9, "forward": 0.25})


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics" / "rank-3.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_figures_are_written_every_few_seconds_and_at_the_end(tmp_path: Path) -> None:
    clock = FakeClock()
    with Metrics(tmp_path, 3, print, clock.monotonic) as metrics:
        metrics.begin(0)
        metrics.add(figures(1))
        assert lines(tmp_path) == []
        clock.sleep(FLUSH_SECONDS)
        metrics.add(figures(2))
        assert len(lines(tmp_path)) == 2
        metrics.add(figures(3))
    assert lines(tmp_path)[0] == {
        "step": 1,
        "time": 0.5,
        "loss": 1 / 3,
        "lr": 1e-4,
        "samples": 4,
        "tokens": 90,
        "padded": 96,
        "seconds": {"data": 0.0, "forward": 0.25},
    }
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_disk_that_is_full_for_a_while_costs_no_line_and_no_training(tmp_path: Path) -> None:
    told: list[str] = []
    with Metrics(tmp_path, 3, told.append) as metrics:
        metrics.begin(0)
        metrics.add(figures(1))
        metrics.flush()
        with file_size_limit((tmp_path / "metrics" / "rank-3.jsonl").stat().st_size + 10):
            for step in (2, 3):
                metrics.add(figures(step))
                metrics.flush()
        metrics.add(figures(4))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    (warning,) = told
    assert warning.endswith("rank-3.jsonl can't be written: File too large")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files of this process can't grow beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_that_can_not_begin_are_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("")
    with pytest.raises(TrainingError, match=r"rank-3\.jsonl can't be written"):
        Metrics(tmp_path, 3, print).begin(0)


@pytest.mark.parametrize(("resumed", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_resumed_run_does_not_tell_a_step_twice(
    tmp_path: Path, resumed: int, kept: list[int]
) -> None:
    with Metrics(tmp_path, 3, print) as metrics:
        metrics.begin(0)
        for step in (1, 2, 3):
            metrics.add(figures(step))
    path = tmp_path / "metrics" / "rank-3.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "ti')

    Metrics(tmp_path, 3, print).begin(resumed)

    assert [line["step"] for line in lines(tmp_path)] == kept


OPTIONS = {"seed": 1, "learning_rate": 0.1, "batch_size": 8}
SAVED = RunIdentity(2, "fp32", "abc", OPTIONS, {"torch": "2.13", "threads per rank": "4"})


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (SAVED._replace(world_size=3), "of 2 ranks, and these are 3"),
        (SAVED._replace(options={**OPTIONS, "seed": 2}), r"other options: --seed 2 \(it was 1\)"),
        (SAVED._replace(options={**OPTIONS, "new": 2}), r"--new 2 \(it was None\)"),
        (SAVED._replace(features="abd"), "the training data is not what"),
    ],
)
def test_another_run_is_refused(now: RunIdentity, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        require_same(SAVED, now)


def test_the_same_run_may_learn_slower_and_says_so() -> None:
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


def test_a_sigterm_that_nobody_looked_at_is_not_lost() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with listen() as wish:
            os.kill(os.getpid(), signal.SIGTERM)
            assert wish.stop
            assert got == []
        assert got == [signal.SIGTERM]
        with suppress(StoppedError), listen():
            os.kill(os.getpid(), signal.SIGTERM)
            raise StoppedError
        assert got == [signal.SIGTERM], "this one was granted"
    finally:
        signal.signal(signal.SIGTERM, before)
