"""What a job will take and cost, by the finished ones of the same command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jobs.places.expected import Expected, find_expected

METAL = "r7iz.metal-16xl"


def keep(root: Path, job: str, seconds: float, load: float = 5.0, **changes: Any) -> None:
    record = {
        "job": job,
        "command": "python x",
        "nnodes": 2,
        "nodes": [{"type": METAL}, {"type": METAL}],
        "state": "succeeded",
        "seconds": seconds,
    }
    (root / job / "job").mkdir(parents=True)
    (root / job / "job/job.json").write_text(json.dumps({**record, **changes}))
    results = {"seconds": {"load": load, "tokenize": 1.0, "train": 99.0}}
    (root / job / "results.json").write_text(json.dumps(results))


def test_only_jobs_of_the_same_kind_on_the_same_nodes_count(tmp_path: Path) -> None:
    keep(tmp_path, "a", 600.0)
    keep(tmp_path, "b", 500.0, 3.0, earlier_s=300.0, more={"spent": {"seconds": 100.0}})
    keep(tmp_path, "c", 1.0, command="python y")
    keep(tmp_path, "d", 1.0, nnodes=1)
    keep(tmp_path, "e", 1.0, nodes=[{"type": "m7i.metal-24xl"}])
    keep(tmp_path, "f", 1.0, state="failed")
    keep(tmp_path, "h", 1.0, cores=8)
    keep(tmp_path, "i", 8.0, command="run", kind="run")  # a program's results.json is the user's
    (tmp_path / "i/results.json").write_text('{"seconds": 12.3}')
    (tmp_path / "g/job").mkdir(parents=True)
    (tmp_path / "g/job/job.json").write_text("{")

    found = find_expected("python x", 2, None, METAL, {"z": 1200.0, "a": 601.0}, tmp_path)

    assert found == Expected({"z": 1200.0, "a": 601.0, "b": 900.0}, 4.0)
    assert find_expected("run", 2, None, METAL, {}, tmp_path) == Expected({"i": 8.0}, 0.0)


def test_an_expectation_has_an_interval_and_a_price() -> None:
    found = Expected({"a": 600.0, "b": 900.0, "c": 1800.0})

    assert found.describe(8.0) == (
        "the same command took 15 min ($2.00) in the median of 3 jobs, 10 min ($1.33) to 30 min ($4.00)"
    )
    assert Expected({"a": 2.0, "b": 89.0}).describe(0.5) == (
        "the same command took 46 s ($0.01) in the median of 2 jobs, 2 s to 1 min 29 s ($0.01)"
    )
    assert Expected({"a": 600.0}).describe(None) == "the same command took 10 min in a"
    assert found.as_dict(8.0) == {
        "jobs": ["a", "b", "c"],
        "seconds_median": 900.0,
        "seconds_low": 600.0,
        "seconds_high": 1800.0,
        "usd_median": 2.0,
        "usd_low": 1.3333,
        "usd_high": 4.0,
    }
    assert Expected().as_dict(8.0) is None
