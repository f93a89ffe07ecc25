"""The model of the step time: its parts, its fit, and the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.experiments.step_model import (
    StepModel,
    StepTiming,
    fit_step_model,
    published_speedups,
)

BYTES = 265e6
MODEL = StepModel(0.02, BYTES, 1.25e9, fixed_s=0.1, latency_s=0.0, ranks_per_node=2)


def test_one_node_computes_and_exchanges_nothing() -> None:
    assert MODEL.step_s(1, 64) == pytest.approx(0.1 + 64 * 0.02)
    assert MODEL.samples_per_second(1, 64) == pytest.approx(64 / 1.38)


def test_a_ring_carries_twice_the_gradients_but_for_the_last_rank() -> None:
    assert MODEL.exchange_s(2) == pytest.approx(2 * 3 / 4 * BYTES / 1.25e9)
    assert MODEL.exchange_s(500) == pytest.approx(2 * BYTES / 1.25e9, rel=0.01)


def test_latency_counts_for_every_bucket_and_round() -> None:
    # By node: four members, and two flows for the bytes of each node.
    by_node = replace(MODEL, by_node=True)
    assert by_node.exchange_s(4) == pytest.approx(1.5 * BYTES / 1.25e9 / 2)
    assert by_node.exchange_s(1) == 0
    slow = StepModel(0.0, BYTES, 1e12, latency_s=1e-3)
    # 11 buckets of 25 MiB, 2 x 3 rounds.
    assert slow.exchange_s(4) == pytest.approx(66e-3, rel=0.02)


@settings(max_examples=30, deadline=None)
@given(sample=st.floats(1e-3, 1.0), fixed=st.floats(0.01, 1.0), gbit=st.floats(1.0, 50.0))
def test_a_fit_of_strong_scaling_separates_fixed_cost_and_network(
    sample: float, fixed: float, gbit: float
) -> None:
    true = StepModel(sample, BYTES, gbit * 1e9 / 8, fixed_s=fixed)
    points = [
        StepTiming(nodes, 32 / nodes, true.step_s(nodes, 32 / nodes)) for nodes in (1, 2, 4, 8)
    ]
    found = fit_step_model(points, BYTES)

    assert found.parameters == ("sample_s", "fixed_s", "bytes_per_second")
    assert found.worst < 1e-3
    assert found.is_tested
    assert found.model.step_s(16, 2) == pytest.approx(true.step_s(16, 2), rel=1e-2)


def test_a_fit_with_as_many_parameters_as_measurements_is_untested() -> None:
    points = [StepTiming(1, 32, 1.0), StepTiming(2, 32, 1.3)]
    found = fit_step_model(points, BYTES)
    assert found.parameters == ("sample_s", "bytes_per_second")
    assert found.worst < 1e-6
    assert not found.is_tested


def test_noise_appears_as_the_models_error() -> None:
    true = StepModel(0.02, BYTES, 1.25e9)
    noise = {1: 1.0, 2: 1.05, 4: 0.95, 8: 1.0}
    points = [StepTiming(n, 64, true.step_s(n, 64) * factor) for n, factor in noise.items()]
    assert 0.02 < fit_step_model(points, BYTES).worst < 0.06


def test_superlinear_nodes_remain_unexplained() -> None:
    found = fit_step_model(
        [StepTiming(1, 32, 1.0), StepTiming(2, 32, 0.8), StepTiming(4, 32, 0.7)], BYTES
    )
    assert found.worst > 0.1


def test_a_fit_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        fit_step_model([], BYTES)
    assert fit_step_model([StepTiming(1, 8, 1.0)], BYTES).model.sample_s == pytest.approx(0.125)


def test_the_published_speedup() -> None:
    assert published_speedups() == {1: 1.0, 4: pytest.approx(3.47, abs=0.01)}
