"""Reading the metrics of the ranks: complete, truncated, resumed, or of another origin."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.report.results_folder import parse_lines, read_metrics
from tests.jobs.report.sample_runs import make_row


def line(step: int, time: float, **more: object) -> str:
    return json.dumps({"step": step, "time": time, "samples": 8, **more})


def test_columns_contain_the_values_of_the_lines_but_for_a_truncated_one() -> None:
    rows = [make_row(0, step) for step in (1, 2, 3)]
    series = parse_lines(0, [*(json.dumps(row) + "\n" for row in rows), line(4, 1.5)[:17]])

    for name in ("step", "time", "loss", "lr", "samples", "tokens", "padded"):
        column = series.step if name == "step" else series[name]
        assert list(column) == [row[name] for row in rows]
    assert list(series["backward"]) == [row["seconds"]["backward"] for row in rows]
    assert series.total("forward") == 1.5
    assert (series.unreadable, series.repeated) == (1, 0)


def test_missing_values_of_a_step_are_nan() -> None:
    series = parse_lines(0, [line(1, 0.5, loss="low", lr=True, tokens=10**400, seconds=[1])])
    assert all(math.isnan(series[name][0]) for name in ("loss", "lr", "tokens", "padded"))
    assert math.isnan(series["data"][0])
    assert series.total("data") == 0


def test_a_resumed_run_replaces_repeated_steps_and_continues_its_time() -> None:
    before = [line(step, step * 1.0, loss=9.0) for step in range(1, 8)]
    after = [line(step, (step - 4) * 1.0, loss=1.0) for step in range(5, 9)]

    series = parse_lines(0, [*before, *after])

    assert list(series.step) == list(range(1, 9))
    assert list(series["time"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(series["loss"]) == [9, 9, 9, 9, 1, 1, 1, 1]
    assert series.repeated == 3
    continuous = [line(1, 1.0), line(2, 2.0), line(3, 3.0), line(2, 2.5), line(3, 3.5)]
    assert list(parse_lines(0, continuous)["time"]) == [1, 2.5, 3.5]


def test_ranks_are_read_in_order_and_other_files_are_ignored(tmp_path: Path) -> None:
    for name in ("rank-10.jsonl", "rank-2.jsonl", "rank-x.jsonl", "rank-1.jsonl.bak", "other"):
        (tmp_path / name).write_text(line(1, 1.0))
    (tmp_path / "rank-3.jsonl").write_text("")
    (tmp_path / "rank-4.jsonl").write_bytes(b"\xff\xfe\n")

    found = read_metrics(tmp_path)

    known = [(series.rank, len(series), series.unreadable) for series in found]
    assert known == [(2, 1, 0), (4, 0, 1), (10, 1, 0)]
    assert read_metrics(tmp_path / "nowhere") == ()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_ROW = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("step", "time", "loss", "samples", "seconds"), _JSON)
)


@settings(max_examples=40)
@given(st.lists(st.text(max_size=20) | _ROW.map(json.dumps) | _JSON.map(json.dumps), max_size=8))
def test_for_any_file_columns_have_equal_length_and_steps_increase(lines: list[str]) -> None:
    series = parse_lines(0, lines)
    steps, times = list(series.step), list(series["time"])
    assert {len(c) for c in series.columns.values()} == {len(steps)}
    assert steps == sorted(set(steps))
    assert all(map(math.isfinite, times))
    assert times == sorted(times)
