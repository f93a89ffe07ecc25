from __future__ import annotations

import itertools

import pytest

from infra.errors import DeadlineError
from infra.wait import wait_until
from tests.fakes import FakeClock


def test_what_is_there_is_not_waited_for() -> None:
    clock = FakeClock()
    assert wait_until("x", lambda: "there", deadline_s=10, clock=clock) == "there"
    assert clock.seconds == 0


def test_a_deadline_is_kept_to_the_second_and_named() -> None:
    clock = FakeClock()
    with pytest.raises(DeadlineError, match="image ready timed out after 2 min"):
        wait_until("image ready", lambda: None, deadline_s=120, clock=clock, every_s=50)
    assert 120 <= clock.seconds < 121


def test_pauses_grow_up_to_their_limit_and_progress_is_reported() -> None:
    clock, result, answers = FakeClock(), list[float](), iter([None] * 6 + [1])
    wait_until(
        "x", lambda: next(answers), deadline_s=100, clock=clock, every_s=2, on_wait=result.append
    )
    pauses = [later - earlier for earlier, later in itertools.pairwise(result)]
    assert pauses == [0.25, 0.5, 1, 2, 2]
