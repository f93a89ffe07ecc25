from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from jobs.worker.runtime.events import Events
from jobs.worker.runtime.output import Metrics, StepFigures
from jobs.worker.runtime.process import StopRequest
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.runtime.steps import Mark, Pace, RankReport, StepReporter, host_shares, how_many
from tests.fakes import FakeClock
from tests.jobs.worker.threaded_ranks import run_threaded


def test_host_shares_ignore_waiting() -> None:
    def mark(*sums: tuple[int, float]) -> Mark:
        return Mark(0.0, 0, [RankReport(samples=1, tokens=n, busy=busy) for n, busy in sums])

    # Each did as much; node b needed three times as long for it, and a has two ranks.
    first, last = mark((5, 1.0), (5, 1.0), (5, 1.0)), mark((95, 2.0), (95, 2.0), (95, 4.0))
    shares = host_shares(["a", "a", "b"], first, last)
    assert shares == {"a": pytest.approx(6 / 7, abs=1e-3), "b": pytest.approx(1 / 7, abs=1e-3)}


@pytest.mark.parametrize(
    ("seconds", "one", "steps"),
    [(1.0, 0.0, 1000), (1.0, 0.01, 100), (1.0, 0.4, 2), (10.0, 0.4, 25), (1.0, 5.0, 1)],
)
def test_steps_fit_into_the_time_within_bounds(seconds: float, one: float, steps: int) -> None:
    assert how_many(seconds, one, 1, 1000) == steps


@dataclass
class TwoRanks:
    """This rank, and another, which sends the same, with another loss, and asks to stop."""

    size: int = 2
    waiting: int = 0

    def gather_later(self, sent: RankReport) -> Callable[[], list[RankReport]]:
        self.waiting += 1

        def receive() -> list[RankReport]:
            self.waiting -= 1
            wanted = sent.samples >= 20  # from the fourth step
            return [sent, sent._replace(loss=3.0, stop=wanted, save=True)]

        return receive


def test_reports_are_read_a_step_later_or_at_once_if_ranks_agree(tmp_path: Path) -> None:
    clock, ranks, seen = FakeClock(), TwoRanks(), list[tuple[int, float]]()

    def check(figures: StepFigures) -> StepFigures:
        seen.append((figures.step, figures.loss))
        return figures

    said = io.StringIO()
    pace = Pace(cast(Ranks, ranks), ["a", "b"], clock.monotonic)
    metrics = Metrics(tmp_path, 0, print)
    reporter = StepReporter(Events(0, said), metrics, pace, StopRequest(), check, 99, 9, 0, 100, 0)

    def take(step: int, now: bool = False) -> tuple[bool, bool, int, int]:
        clock.sleep(0.5)
        figures = StepFigures(step, 0.5 * step, 1.0, 0.1, 5, 50, 60, {})
        agreed = reporter.take(figures, 0.4, now=now, save=False)
        return *agreed, ranks.waiting, reporter.samples

    assert take(1) == (False, False, 1, 100)
    assert take(2) == (False, False, 1, 110)
    assert take(3, now=True) == (False, False, 0, 130)
    assert pace.speed(total=5) == (20.0, 200.0, 1.0)
    assert take(4) == (False, False, 1, 130)
    assert take(5) == (True, False, 0, 150), "only rank 0 decides when to save"
    assert seen == [(step, 2.0) for step in range(1, 6)]
    assert '"step": 1, "total": 99' in said.getvalue()


@pytest.mark.parametrize("tokens", [0, 7])
def test_samples_are_those_of_all_ranks_of_which_some_have_fewer(
    tmp_path: Path, tokens: int
) -> None:
    def work(ranks: Ranks) -> tuple[int, int]:
        events = Events(ranks.rank, io.StringIO())
        metrics, pace = Metrics(tmp_path, ranks.rank, events.note), Pace(ranks, ["a", "a", "b"])
        counts = 4, 2, 0, 100, 0
        reporter = StepReporter(events, metrics, pace, StopRequest(), lambda each: each, *counts)
        for step in range(1, 5):  # eight samples, planned for four ranks
            figures = StepFigures(step, step, 1.0, 0.1, 2 + (ranks.rank < 2), tokens, tokens, {})
            reporter.take(figures, 0.1, now=False, save=False)
        return reporter.samples, reporter.tokens

    assert run_threaded(3, work) == [(132, 12 * tokens)] * 3
