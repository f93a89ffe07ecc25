"""What ended jobs have cost: by month, owner, cluster, and tag, from folders of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from jobs.places.plan import own_folder
from jobs.report.history import read_costs, sum_by
from tests.jobs.report.sample_runs import make_folder

RECORD: dict[str, Any] = {
    "cluster": "bert",
    "owner": "ann",
    "seconds": 1800.0,
    "cloud": "aws",
    "usd_per_hour": 6.0,
    "price_source": "a list",
    "nodes": [{"type": "r7iz.metal-16xl"}] * 2,
}


def add(root: Path, job: str, folder: str = "", **changes: Any) -> None:
    own = own_folder(root / (folder or job))
    own.mkdir(parents=True)
    (own / "job.json").write_text(json.dumps({**RECORD, "job": job, **changes}))


def test_jobs_are_added_up_by_month_owner_cluster_and_tag(tmp_path: Path) -> None:
    when = "2026-11-30T23:00:00+00:00"
    tags = [["team", "nlp"], ["x", "1"], 3]
    add(tmp_path, "run-1", when=when, ended="2026-12-01", tags=tags)
    add(tmp_path, "run-1", "an earlier end", when=when, ended="2026-11-30", seconds=9.0)
    add(tmp_path, "run-1", "sent", seconds=None)
    add(tmp_path, "run-2", when="2026-12-01T00:00:00+00:00", tags=[["team", "nlp"]], owner="bob")
    add(tmp_path, "run-3", when="2026-10-01T00:00:00+00:00", cloud="local", cluster="other")
    add(tmp_path, "run-4", seconds=None)  # it has not ended
    add(tmp_path, "run-4", "same", seconds=None, tags=7)
    (tmp_path / "notes.txt").write_text("")

    found, uncounted = read_costs(tmp_path)

    assert uncounted == ["run-4"]
    assert [each.job for each in found] == ["run-3", "run-1", "run-2"]
    assert [each.usd for each in found] == [None, pytest.approx(6.0), pytest.approx(6.0)]
    by_tag = sum_by(found, "tags")
    assert list(by_tag) == ["team=nlp", "x=1"]
    assert by_tag["team=nlp"] == {
        "jobs": 2,
        "node_hours": 2.0,
        "usd": pytest.approx(12.0),
        "unpriced": 0,
    }
    by_cluster = sum_by(found, "cluster")
    assert (by_cluster["other"]["usd"], by_cluster["other"]["unpriced"]) == (None, 1)
    by_owner = sum_by(found, "owner")
    assert (by_owner["ann"]["usd"], by_owner["ann"]["unpriced"]) == (pytest.approx(6.0), 1)
    assert list(sum_by(found, "month")) == ["2026-10", "2026-11", "2026-12"]
    assert {name: one["jobs"] for name, one in by_owner.items()} == {"ann": 2, "bob": 1}
    assert read_costs(tmp_path / "none") == ([], [])


def test_the_steps_of_a_job_are_not_read_for_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "run-1", steps=2)
    (tmp_path / "run-1/job/job.json").write_text(json.dumps({**RECORD, "job": "run-1"}))
    monkeypatch.setattr("jobs.report.results_folder.read_metrics", Mock(side_effect=AssertionError))
    ((one,), _) = read_costs(tmp_path)
    assert one.usd == pytest.approx(6.0)
