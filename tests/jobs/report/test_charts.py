"""Axes, thinning and smoothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.report.charts import (
    ChartPoint,
    Line,
    LineChart,
    axes,
    make_axis,
    round_up,
    sample,
    smooth,
    thin,
)


def points(*ys: float) -> list[ChartPoint]:
    return [ChartPoint(float(x), y) for x, y in enumerate(ys)]


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 10, False, ["0", "2", "4", "6", "8", "10"]),
        (0, 1, False, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 12.5, False, ["0", "2.5", "5.0", "7.5", "10.0", "12.5"]),
        (0, 100_000, True, ["0", "20k", "40k", "60k", "80k", "100k"]),
        (0, 6_000, True, ["0", "2,000", "4,000", "6,000"]),
        (1, 4, True, ["1", "2", "3", "4"]),
        (0, 1e-4, False, ["0", "2e-5", "4e-5", "6e-5", "8e-5", "1e-4"]),
        (0, 0, False, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 3e7, False, ["0", "10M", "20M", "30M"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, whole: bool, expected: list[str]) -> None:
    assert [text for _, text in make_axis(low, high, whole=whole).ticks] == expected


@given(st.floats(1e-12, 1e12))
def test_an_axis_ends_at_or_just_above_its_highest_value(value: float) -> None:
    end = round_up(value)
    assert value * (1 - 1e-9) <= end <= 2.1 * value
    assert 3 <= len(make_axis(0, end).ticks) <= 7


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300), st.integers(1, 50)
)
def test_thinning_keeps_the_extremes(ys: list[float], bins: int) -> None:
    low, high = thin(points(*ys), bins)

    known = [y for y in ys if math.isfinite(y)]
    assert len(low) == len(high) <= bins
    assert [p.x for p in low] == sorted({p.x for p in low})
    if known:
        assert min(p.y for p in low if math.isfinite(p.y)) == min(known)
        assert max(p.y for p in high if math.isfinite(p.y)) == max(known)
    else:
        assert all(math.isnan(p.y) for p in (*low, *high))


def test_smoothing_is_a_moving_average_that_keeps_gaps() -> None:
    assert [p.y for p in smooth(points(0, 3, 6, 9), 3)] == [1.5, 3, 6, 7.5]
    gap = smooth(points(2, math.nan, 4), 3)
    assert [gap[0].y, gap[2].y] == [2, 4]
    assert math.isnan(gap[1].y)


def test_a_sample_includes_both_ends() -> None:
    ends = {size: [p.x for p in sample(points(*range(size)), 4)] for size in (0, 3, 4, 100)}
    assert ends == {0: [], 3: [0, 1, 2], 4: [0, 1, 2, 3], 100: [0, 33, 66, 99]}


def chart(*ys: float) -> LineChart:
    return LineChart("", "x", "y", [Line("l", points(*ys))])


def test_axes_contain_the_whole_chart_and_y_starts_at_zero() -> None:
    x, y = axes(chart(3, math.nan, 7.3))
    assert (x.low, x.high, y.low, y.high) == (0, 2, 0, 8)
    assert axes(chart(-3, -1))[1].high == 0
    assert axes(chart(0, 0))[1][:2] == (0, 1)
