from __future__ import annotations

import pytest

from jobs.worker.training.state import PATIENCE, DivergenceDetector


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
def test_a_loss_that_is_far_too_high_for_long_is_divergence(
    losses: list[float], diverged: bool
) -> None:
    watch, seen = DivergenceDetector(), False
    for loss in losses:
        watch.see(loss)
        seen = seen or watch.diverged
    assert seen is diverged


def test_a_loss_is_suspicious_long_before_it_counts_as_diverged() -> None:
    watch = watched(*[1.0] * 50, *[20.0] * 10)
    assert watch.suspicious
    assert not watch.diverged
    assert watch.high < PATIENCE


@pytest.mark.parametrize(
    ("losses", "total", "at"),
    [
        ([5.9] * 3000, 1000, [500]),
        ([5.9] * 3000, 10_000, [2000]),
        ([6 - 2 * n / 500 for n in range(900)], 1000, []),
        ([5.9] * 300, 300, []),
    ],
    ids=["learns nothing", "a fifth of a long run", "learns", "too short to say"],
)
def test_a_loss_that_does_not_fall_is_noted_once(
    losses: list[float], total: int, at: list[int]
) -> None:
    watch, found = DivergenceDetector(), []
    for step, loss in enumerate(losses, start=1):
        watch.see(loss)
        if watch.is_stuck(total):
            found.append(step)
    assert found == at
