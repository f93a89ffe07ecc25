from __future__ import annotations

import itertools

import pytest

from infra.errors import DeadlineError
from infra.wait import wait_until
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("seconds", "text"), [(2, "2 s"), (90, "1 min 30 s"), (5400, "1 h 30 min")]
)
def test_a_deadline_is_kept_to_the_second_and_named(seconds: int, text: str) -> None:
    clock = FakeClock()
    assert wait_until("x", lambda: "there", deadline_s=10, clock=clock) == "there"
    assert clock.now == 0
    with pytest.raises(DeadlineError, match=f"image ready timed out after {text}$"):
        wait_until("image ready", lambda: None, deadline_s=seconds, clock=clock, every_s=50)
    assert seconds <= clock.now < seconds + 1


def test_pauses_grow_up_to_their_limit_and_progress_is_reported() -> None:
    clock, result, answers = FakeClock(), list[float](), iter([None] * 6 + [1])
    wait_until(
        "x", lambda: next(answers), deadline_s=100, clock=clock, every_s=2, on_wait=result.append
    )
    pauses = [later - earlier for earlier, later in itertools.pairwise(result)]
    assert pauses == [0.25, 0.5, 1, 2, 2]
