"""Finding and reading results folders; unreadable ones are errors of one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.report.results_folder import find_folder, read_run
from tests.jobs.report.sample_runs import make_folder, make_results


def test_a_complete_folder_is_read(tmp_path: Path) -> None:
    run = read_run(make_folder(tmp_path / "run", ranks=2, steps=5))
    assert (run.name, run.nodes, len(run.series), run.number("f1")) == ("run", 2, 2, 80.5)
    assert run.seconds["train"] == 800.0
    assert len(run.loss_curve) == 300
    fewer = make_folder(tmp_path / "resumed on one", ranks=2, steps=5, world_size=1)
    assert [series.rank for series in read_run(fewer).series] == [0]


@pytest.mark.parametrize(("record", "nodes"), [({"nodes": [{}] * 4}, 4), ({}, 2)])
def test_a_study_has_also_the_nodes_without_trials(
    tmp_path: Path, record: dict[str, Any], nodes: int
) -> None:
    trials = [{"trial": n, "host": f"node{n % 2}"} for n in range(3)]
    folder = make_folder(tmp_path / "run", steps=1, trials=trials)
    (folder / "job/job.json").write_text(json.dumps(record))
    assert read_run(folder).nodes == nodes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", r"results\.json: expected a JSON object"),
        (b"{}", r"contains neither results\.json nor job/metrics/rank-0\.jsonl"),
    ],
)
def test_a_bad_file_is_an_error_of_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_run(tmp_path)


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
