"""The figures of a report, compared with known values; axes, thinning, and smoothing of charts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import UsageError
from jobs.report import figures
from jobs.report.charts import (
    ChartPoint,
    Line,
    LineChart,
    axes,
    make_axis,
    smooth,
    thin,
)
from jobs.report.results_folder import RankMetrics, Run, parse_lines, read_run
from jobs.report.sections import tiles_of
from tests.jobs.report.sample_runs import make_folder, make_results


def made(ranks: int = 2, **changes: Any) -> Run:
    return Run(Path("run"), make_results(ranks, **changes), (), {})


def steps(*rows: tuple[int, float, float]) -> RankMetrics:
    """Rows of step, time, samples."""
    return parse_lines(0, [json.dumps({"step": s, "time": t, "samples": n}) for s, t, n in rows])


def test_rates_are_exact_for_any_number_of_intervals() -> None:
    series = steps((1, 1.0, 10), (2, 3.0, 40), (3, 4.0, 10))
    assert [p.y for p in figures.rates(series, "samples", 4)] == [10, 20, 20, 10]
    assert [p.y for p in figures.rates(series, "samples", 2)] == [15, 15]
    assert [p.x for p in figures.rates(series, "samples", 2)] == [1, 3]
    assert sum(p.y for p in figures.rates(series, "samples", 7)) * 4 / 7 == pytest.approx(60)
    assert figures.rates(series, "tokens", 4) == []
    assert figures.rates(steps(), "samples", 4) == []
    resumed = steps((50, 100.0, 10), (51, 101.0, 20), (52, 102.0, 20))
    assert [p.y for p in figures.rates(resumed, "samples", 2)] == [20, 20]


def test_the_shares_of_a_run_add_up_to_its_time(tmp_path: Path) -> None:
    run = read_run(make_folder(tmp_path / "run", ranks=3, steps=40))
    shares = figures.run_shares(run)

    assert sum(shares.values()) == pytest.approx(864.0)
    assert shares["preparation"] == pytest.approx(29.7)
    assert shares["evaluation"] == 31.0
    assert shares["forward"] == pytest.approx(20.0)
    assert "training" not in shares
    whole = figures.run_shares(made())  # without metrics
    assert [whole["training"], sum(whole.values())] == pytest.approx([800.0, 864.0])
    assert figures.run_shares(made(seconds={})) == {}
    longer = read_run(make_folder(tmp_path / "longer", seconds={"train": 1.0, "total": 1.0}))
    assert sum(figures.run_shares(longer).values()) == pytest.approx(1.0)


NODES: dict[str, Any] = {"cloud": "aws", "nodes": [{"type": "r7iz.metal-16xl"}] * 2}
RECORDED = {**NODES, "usd_per_hour": 1.5, "price_source": "Price List API"}
SHARE = {**RECORDED, "node_share": 0.25}
TYPES, LIST = "2 × r7iz.metal-16xl", "on demand, table of July 2026, us-east-1"
OWN = "on demand, with disk and address, Price List API"


@pytest.mark.parametrize(
    ("job", "kind", "given", "usd", "source"),
    [
        ({}, None, 2.5, 5.0, "2 × $2.5, as given"),
        (NODES, None, None, 13.0944, f"{TYPES}, {LIST}"),
        (
            {**NODES, "region": "eu-west-1"},
            *(None, None, 13.0944, f"{TYPES}, {LIST}; the price in eu-west-1 is unknown"),
        ),
        ({**RECORDED, "region": "eu-west-1"}, None, None, 3.0, f"{TYPES}, {OWN}"),
        (SHARE, None, None, 0.75, f"{TYPES}, 25.0% of it by cores, {OWN}"),
        (SHARE, None, 2.0, 1.0, "2 × $2, as given, 25.0% of it by cores"),
        (SHARE, "r7iz.metal-16xl", None, 3.2736, f"{TYPES}, 25.0% of it by cores, {LIST}"),
        ({**NODES, "cloud": "local"}, None, None, None, ""),
        ({**NODES, "nodes": [{"type": "x1.large"}] * 2}, None, None, None, ""),
        ({**NODES, "nodes": "many"}, None, None, None, ""),
    ],
)
def test_the_price_is_the_given_or_recorded_one_or_the_tables(
    job: dict[str, Any], kind: str | None, given: float | None, usd: float | None, source: str
) -> None:
    found = figures.find_price(Run(Path("run"), make_results(2), (), job), kind, given)
    assert (found and found.usd_per_hour) == pytest.approx(usd)
    assert (found.source if found else "") == source
    with pytest.raises(UsageError, match="needs the number of nodes"):
        figures.find_price(Run(Path("run"), {}, (), {}), "r7iz.metal-16xl", None)


def test_speedup_is_relative_to_the_fewest_nodes() -> None:
    speeds = [(4, 180.0), (1, 40.0), (1, 60.0), (2, 90.0)]
    runs = [made(nodes, samples_per_second=speed) for nodes, speed in speeds]
    unknown = [made(8, samples_per_second=None), made(8, trials=[{}]), Run(Path("b"), {}, (), {})]
    found = figures.speedups([*runs, *unknown])
    assert [(s.nodes, s.speedup) for s in found] == [(1, 0.8), (1, 1.2), (2, 1.8), (4, 3.6)]
    assert [s.efficiency for s in found] == pytest.approx([0.8, 1.2, 0.9, 0.9])
    assert figures.speedups(runs[1:3]) == []
    assert figures.differences([made(), made(dtype="fp32", seed=1)]) == ["dtype"]


def test_tiles_have_the_units_of_their_figures() -> None:
    scores = {"macro_f1": 84.26, "mse": 0.01234, "perplexity": 20.04, "has_answer_f1": 51.5}
    run = made(scores=scores, eval_records=40, has_answer_total=20)
    shown = {tile.label: (tile.value, tile.remark) for tile in tiles_of(run, None)}
    assert shown["macro F1"] == ("84.3 %", "of 40 records")
    assert shown["F1 with an answer"] == ("51.5 %", "of 20 records")
    assert (shown["mean squared error"][0], shown["perplexity"][0]) == ("0.0123", "20.0")
    assert shown["Cost per epoch"] == ("–", "price unknown")
    pairs = made(scores={"mrr": 70.0}, eval_records=40, anchors=8, samples_per_second=None)
    remarks = {tile.label: tile.remark for tile in tiles_of(pairs, None)}
    assert "of 8 anchors" in remarks.values()
    assert "Cost per epoch" not in remarks, "nothing was trained"


def points(*ys: float) -> list[ChartPoint]:
    return [ChartPoint(float(x), y) for x, y in enumerate(ys)]


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 1, False, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 100_000, True, ["0", "20k", "40k", "60k", "80k", "100k"]),
        (1, 4, True, ["1", "2", "3", "4"]),
        (0, 1e-4, False, ["0", "2e-5", "4e-5", "6e-5", "8e-5", "1e-4"]),
        (0, 3e7, False, ["0", "10M", "20M", "30M"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, whole: bool, expected: list[str]) -> None:
    assert [text for _, text in make_axis(low, high, whole=whole).ticks] == expected


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


def chart(*ys: float) -> LineChart:
    return LineChart("", "x", "y", [Line("l", points(*ys))])


def test_axes_contain_the_whole_chart_and_y_starts_at_zero() -> None:
    x, y = axes(chart(3, math.nan, 7.3))
    assert (x.low, x.high, y.low, y.high) == (0, 2, 0, 8)
    assert axes(chart(-3, -1))[1].high == 0
    assert axes(chart(0, 0))[1][:2] == (0, 1)
