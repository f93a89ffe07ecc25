from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from jobs.worker.runtime.events import Events
from jobs.worker.runtime.output import Metrics
from jobs.worker.runtime.process import StopRequest
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.runtime.steps import Pace, RankReport, StepReporter, host_shares, how_many
from tests.fakes import FakeClock
from tests.jobs.worker.threaded_ranks import run_threaded


def test_host_shares_ignore_waiting() -> None:
    def said(tokens: int, busy: float) -> RankReport:
        return RankReport(1, tokens, busy, False, False, 1)

    # Each did as much; node b needed three times as long for it, and a has two ranks.
    shares = host_shares(["a", "a", "b"], [said(90, 1.0), said(90, 1.0), said(90, 3.0)])
    assert shares == {"a": pytest.approx(6 / 7, abs=1e-3), "b": pytest.approx(1 / 7, abs=1e-3)}


@pytest.mark.parametrize(
    ("seconds", "one", "steps"),
    [(1.0, 0.0, 1000), (1.0, 0.01, 100), (1.0, 0.4, 2), (10.0, 0.4, 25), (1.0, 5.0, 1)],
)
def test_steps_fit_into_the_time_within_bounds(seconds: float, one: float, steps: int) -> None:
    assert how_many(seconds, one, 1, 1000) == steps


@dataclass
class TwoRanks:
    """This rank, and another with a fixed report."""

    other: RankReport
    heard: list[RankReport] = field(default_factory=list)

    def gather(self, value: RankReport) -> list[RankReport]:
        self.heard.append(value)
        return [value, self.other]


def test_any_rank_can_stop_all_and_rank_0_decides_when_to_save() -> None:
    clock = FakeClock()
    ranks = TwoRanks(RankReport(3, tokens=50, busy=1.0, stop=True, save=True, next_in=77))
    pace = Pace(cast(Ranks, ranks), ["a", "b"], clock.monotonic)
    pace.begin(10, samples=100, tokens=1000)
    assert pace.next_talk == 11
    clock.sleep(0.5)
    pace.count(samples=5, tokens=150, busy=0.4)

    agreed = pace.talk(11, stop=False, save=False)

    assert agreed == (8, 200, True, False), "the ranks' numbers of samples differ"
    assert pace.next_talk == 13
    pace.mark(11, 108, 1200)
    assert pace.speed(total=21) == (16.0, 400.0, 5.0)
    pace.talk(13, stop=False, save=False)
    assert ranks.heard[-1][:2] == (0, 0), "counted once"


@pytest.mark.parametrize("tokens", [0, 7])
def test_samples_are_those_of_all_ranks_of_which_some_have_fewer(
    tmp_path: Path, tokens: int
) -> None:
    def work(ranks: Ranks) -> tuple[int, int]:
        events = Events(ranks.rank, io.StringIO())
        metrics, pace = Metrics(tmp_path, ranks.rank, events.note), Pace(ranks, ["a", "a", "b"])
        reporter = StepReporter(events, metrics, pace, StopRequest(), 4, 2, samples=100)
        for _ in range(4):  # eight samples, planned for four ranks
            reporter.step(loss=1.0, samples=2 + (ranks.rank < 2), tokens=tokens)
        return reporter.samples, reporter.tokens

    assert run_threaded(3, work) == [(132, 12 * tokens)] * 3
