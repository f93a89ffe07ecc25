"""The figures of a report, compared with known values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.report import figures
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


def test_tokens_and_padding(tmp_path: Path) -> None:
    run = read_run(make_folder(tmp_path / "run", steps=10))
    assert figures.padding_share(run) == pytest.approx(1 - 178 / 184)
    assert figures.tokens_per_second(run) == 19600.0
    assert figures.padding_share(made()) is None
    assert figures.tokens_per_second(made(tokens_per_second=None)) is None


def test_tiles_have_the_units_of_their_figures() -> None:
    run = made(scores={"macro_f1": 84.26, "mse": 0.01234, "perplexity": 20.04}, eval_records=40)
    shown = {tile.label: (tile.value, tile.remark) for tile in tiles_of(run, None)}
    assert shown["macro F1"] == ("84.3 %", "of 40 records")
    assert (shown["mean squared error"][0], shown["perplexity"][0]) == ("0.0123", "20.0")
    assert shown["Cost per epoch"] == ("–", "price unknown")
    pairs = made(scores={"mrr": 70.0}, eval_records=40, anchors=8, samples_per_second=None)
    remarks = {tile.label: tile.remark for tile in tiles_of(pairs, None)}
    assert "of 8 anchors" in remarks.values()
    assert "Cost per epoch" not in remarks, "nothing was trained"
