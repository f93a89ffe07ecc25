from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from jobs.worker.runtime.ranks import Ranks
from jobs.worker.runtime.steps import Pace, RankReport, host_shares, how_many
from tests.fakes import FakeClock


def test_host_shares_ignore_waiting() -> None:
    def said(tokens: int, busy: float) -> RankReport:
        return RankReport(tokens, busy, False, False, 1)

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
    ranks = TwoRanks(RankReport(tokens=50, busy=1.0, stop=True, save=True, next_in=77, samples=2))
    pace = Pace(cast(Ranks, ranks), ["a", "b"], clock.monotonic)
    pace.begin(10, samples=100, tokens=1000)
    assert pace.next_talk == 11
    clock.sleep(0.5)
    pace.count(tokens=150, busy=0.4, samples=3)

    agreed = pace.talk(11, stop=False, save=False)

    assert agreed == (200, True, False, 5)
    assert pace.next_talk == 13
    pace.mark(11, 108, 1200)
    assert pace.speed(total=21) == (16.0, 400.0, 5.0)
    pace.talk(13, stop=False, save=False)
    assert ranks.heard[-1].tokens == 0, "counted once"
