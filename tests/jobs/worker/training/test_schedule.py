from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jobs.worker.tasks.squad.task import DEMO
from jobs.worker.training.batches import Schedule, plan_schedule


def test_the_rate_rises_then_falls_and_is_never_zero() -> None:
    schedule = plan_schedule(replace(DEMO, epochs=2, batch_size=5, warmup_ratio=0.2), 50, ranks=1)
    assert schedule == Schedule(per_epoch=10, total=20, warmup=4, shape="linear")
    rates = [schedule.rate(step) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == pytest.approx([(20 - step) / 16 for step in range(4, 20)])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [1.0] * 16),
        ("cosine", [(1 + math.cos(math.pi * n / 16)) / 2 for n in range(16)]),
    ],
)
def test_the_rate_after_the_warm_up_has_another_shape(shape: str, expected: list[float]) -> None:
    schedule = plan_schedule(
        replace(DEMO, epochs=2, batch_size=5, warmup_ratio=0.2, lr_schedule=shape), 50, ranks=1
    )
    assert [schedule.rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [schedule.rate(step) for step in range(4, 20)] == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("max_steps", [1, 2, 7])
def test_short_runs_learn_too(warmup_ratio: float, max_steps: int, shape: str) -> None:
    options = replace(DEMO, warmup_ratio=warmup_ratio, max_steps=max_steps, lr_schedule=shape)
    schedule = plan_schedule(options, 108, ranks=2)
    assert schedule.total == max_steps
    # One rate more than steps: torch's scheduler asks for it after the last step.
    assert all(0 < schedule.rate(step) <= 1 for step in range(max_steps + 1))
