"""Finding and reading results folders, and the metrics of ranks: complete, resumed, or of another origin."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.report.results_folder import find_folder, parse_lines, read_metrics, read_run
from tests.jobs.report.sample_runs import make_folder, make_results, make_row


def test_a_complete_folder_is_read(tmp_path: Path) -> None:
    run = read_run(make_folder(tmp_path / "run", ranks=2, steps=5))
    assert (run.name, run.nodes, len(run.series), run.number("f1")) == ("run", 2, 2, 80.5)
    assert run.seconds["train"] == 800.0
    assert len(run.loss_curve) == 300
    fewer = make_folder(tmp_path / "resumed on one", ranks=2, steps=5, world_size=1)
    assert [series.rank for series in read_run(fewer).series] == [0]


def test_a_study_has_also_the_nodes_without_trials(tmp_path: Path) -> None:
    trials = [{"trial": n, "host": f"node{n % 2}"} for n in range(3)]
    folder = make_folder(tmp_path / "run", steps=1, trials=trials)
    assert read_run(folder).nodes == 2
    (folder / "job/job.json").write_text('{"nodes": [{}, {}, {}, {}]}')
    assert read_run(folder).nodes == 4


def test_values_of_other_types_count_as_unknown(tmp_path: Path) -> None:
    changes = {
        "f1": "high",
        "em": True,
        "samples_per_second": float("nan"),
        "seconds": [1],
        "ranks": [3, None],
        "loss_curve": [[1], [2, "x"], 7, [3, 1.5]],
        "model": 7,
    }
    (tmp_path / "results.json").write_text(json.dumps({**make_results(), **changes}))
    run = read_run(tmp_path)
    assert [run.number(key) for key in ("f1", "em", "samples_per_second", "none")] == [None] * 4
    assert (run.seconds, run.ranks, run.nodes, run.text("model")) == ({}, [], None, None)
    assert [x for x, _ in run.loss_curve] == [2, 3]
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UsageError, match=r"contains neither results\.json nor job/metrics/rank-0"):
        read_run(tmp_path)


def test_a_job_is_found_below_results_and_by_default_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no results in \./results"):
        find_folder(None)
    for age, name in enumerate(("run-3", "squad-2", "squad-1")):
        folder = make_folder(Path("results", name), steps=1)
        if name == "run-3":  # a program's results.json is the user's
            (folder / "job/metrics").rename(folder / "metrics")
            (folder / "job/job.json").write_text('{"kind": "run", "more": 3}')
            continue
        for path in (folder / "results.json", folder / "job/metrics"):
            os.utime(path, (1000 - age, 1000 - age))

    assert find_folder(None) == Path("results/squad-2")
    assert find_folder("squad-1") == Path("results/squad-1")
    assert find_folder("results/squad-1") == Path("results/squad-1")
    with pytest.raises(UsageError, match="squad-3: no such folder, and none in") as caught:
        find_folder("squad-3")
    assert caught.value.hint == "spr-cluster fetch squad-3"
    make_folder(tmp_path.parent / f"{tmp_path.name}-beside", steps=1)
    with pytest.raises(UsageError, match="no such folder"):
        find_folder(f"../../{tmp_path.name}-beside")
    with pytest.raises(UsageError, match="is a file"):
        find_folder("results/squad-1/results.json")
    with pytest.raises(UsageError, match="no such folder"):
        read_run(Path("nowhere"))


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


def test_lines_that_are_no_steps_are_skipped() -> None:
    steps = ['"1"', "true", "-1", "2.5", "null", str(2**62)]
    times = ["-1", "NaN", "1e13", '"1"', "null"]
    lines = [
        "7",
        "[]",
        "{}",
        "[" * 100_000,
        "x",
        *(f'{{"step": {each}, "time": 1}}' for each in steps),
    ]
    lines += [f'{{"step": 1, "time": {each}}}' for each in times]
    series = parse_lines(0, [*lines, "", line(1, 0.5)])
    assert (list(series.step), series.unreadable) == ([1], len(lines))


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
