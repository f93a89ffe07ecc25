"""A job's receipt: its parts are all of its time and money; what the jobs in a folder have cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from jobs.places.plan import own_folder
from jobs.report.figures import HourlyPrice
from jobs.report.history import read_costs, sum_by
from jobs.report.receipt import Receipt, add_receipt, make_receipt, read_receipt
from jobs.report.results_folder import PARTS, Run, read_run
from jobs.worker.runtime.errors import TrainingError
from tests.jobs.report.sample_runs import make_folder, make_results

PRICE = HourlyPrice(36.0, "a list")
RECORD = {"seconds": 900.0, "boot_s": 600.0, "nodes": [{}, {}, {}]}


def receipt_of(job: dict[str, Any], **changes: Any) -> Receipt:
    found = make_receipt(Run(Path("run"), make_results(3, **changes), (), job), PRICE)
    assert found
    return found


def test_the_parts_of_a_receipt_are_all_that_the_job_took(tmp_path: Path) -> None:
    run = read_run(make_folder(tmp_path / "run", ranks=3, steps=40))
    found = make_receipt(
        Run(run.folder, run.results, run.series, {**RECORD, "earlier_s": 300.0}), PRICE
    )

    assert found
    assert found.total_s == pytest.approx(600 + 1200)
    seconds = found.seconds
    assert seconds["boot and installation"] == 600
    assert seconds["earlier attempts and pauses"] == 300
    assert seconds["staging and start"] == pytest.approx(900 - 864)
    assert seconds["evaluation"] == 31.0
    assert seconds["tokenizing"] + seconds["reading the data"] == pytest.approx(29.7)
    totals = [sum(each.total(name) for each in run.series) / 3 for name in PARTS]
    data, forward, backward, communication, optimizer = totals
    assert seconds["waiting for ranks"] == pytest.approx(communication)
    assert seconds["computing"] == pytest.approx(data + forward + backward + optimizer)
    parts = found.as_dict()["parts"].values()
    assert sum(part["usd"] for part in parts) == pytest.approx(18.0)
    assert found.rows()[-1] == ("total", "30 min 00 s", "$18.00")


def test_a_receipt_begins_with_the_submission_and_what_was_paid_before_it() -> None:
    times = {"when": "2026-11-28T10:00:00+00:00", "ended": "2026-11-28T10:30:00+00:00"}
    before = {"former_s": 240.0, "resumed_s": 120.0, "earlier_s": 60.0}
    found = make_receipt(Run(Path("run"), {}, (), {**RECORD, **times, **before}), PRICE)
    assert found
    assert found.seconds == {
        "boot and installation": 600.0,
        "failed or replaced nodes": 240.0,
        "earlier attempts and pauses": 180.0,
        "staging and start": pytest.approx(1800 - 900 - 60),
        "other": 900.0,
    }


def test_what_was_on_more_nodes_counts_as_longer() -> None:
    """Four nodes for an idle hour and five others, of which three made the last one; each costs $12."""
    hours = {"seconds": 1, "idle_s": 1, "earlier_s": 5, "earlier_node_s": 20}
    record = {name: 3600.0 * count for name, count in hours.items()}
    found = receipt_of({"nodes": [{}] * 3, "nnodes": 4, **record})
    assert found.usd(found.total_s) == pytest.approx(12 * (4 + 20 + 3))


def test_a_resumed_runs_own_times_are_scaled_to_what_this_job_took() -> None:
    found = receipt_of({**RECORD, "seconds": 432.0, "boot_s": 0.0})
    assert found.total_s == pytest.approx(432)
    assert found.seconds["evaluation"] == pytest.approx(15.5)
    more = receipt_of(RECORD, seconds={"train": 1800.0, "total": 900.0})
    assert more.seconds == {"boot and installation": 600.0, "computing": 900.0}


def test_without_a_record_or_results_there_is_no_more_than_is_known() -> None:
    assert make_receipt(Run(Path("run"), make_results(2), (), {}), PRICE) is None
    found = receipt_of(RECORD, seconds={})
    assert found.seconds == {"boot and installation": 600.0, "other": 900.0}
    free = Receipt({"computing": 60.0}, 2, None)
    assert free.rows() == [("computing", "1 min 00 s", "–"), ("total", "1 min 00 s", "–")]
    assert free.as_dict()["usd"] is None


def test_nodes_that_mostly_wait_are_too_many() -> None:
    def advice(waiting: float, nodes: int) -> str:
        seconds = {"other": 50.0, "computing": 100.0, "waiting for ranks": waiting}
        return Receipt(seconds, nodes, PRICE).advice

    assert (advice(29.0, 4), advice(100.0, 1)) == ("", "")
    found = advice(100.0, 4)
    assert found.startswith(
        "50 % of training was waiting: 2 nodes instead of 4 would cost about $1.75 "
    )


def test_the_receipt_is_kept_with_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "run", ranks=2, steps=10)
    price = {"cloud": "aws", "usd_per_hour": 6.0, "price_source": "a list"}
    job = {**RECORD, **price, "nodes": [{"type": "r7iz.metal-16xl"}] * 2}
    (folder / "job/job.json").write_text(json.dumps(job))

    returned = add_receipt(folder)

    kept = json.loads((folder / "results.json").read_text())
    assert kept == {**make_results(2), **returned}
    assert kept["receipt"]["usd"] == pytest.approx(12 * 1500 / 3600)
    assert add_receipt(folder) == returned
    with monkeypatch.context() as patch:
        patch.setattr("jobs.report.receipt.save_json", Mock(side_effect=TrainingError("disk full")))
        assert add_receipt(folder) == {}
    for more, added in (({"elements": 3}, returned), ({}, {})):  # an array, and a program
        (folder / "job/job.json").write_text(json.dumps({**job, "kind": "run", "more": more}))
        assert add_receipt(folder) == added
    (folder / "results.json").write_text('{"trials": [{}], "seconds": {"total": 9}}')
    run, receipt = read_receipt(folder) or (None, None)
    assert run
    assert receipt
    assert (run.results, receipt.nodes, receipt.total_s) == ({}, 2, 1500)
    assert add_receipt(tmp_path / "none") == {}
    (folder / "results.json").unlink()
    assert add_receipt(folder) == {}
    _, failed = read_receipt(folder) or (None, None)
    assert failed
    assert failed.total_s == 1500


ENDED: dict[str, Any] = {
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
    (own / "job.json").write_text(json.dumps({**ENDED, "job": job, **changes}))


def test_jobs_are_added_up_by_month_owner_cluster_and_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = "jobs.report.results_folder.read_metrics"  # many, which do not matter for the cost
    monkeypatch.setattr(steps, Mock(side_effect=AssertionError))
    when = "2026-11-30T23:00:00+00:00"
    tags = [["team", "nlp"], ["x", "1"], 3]
    add(tmp_path, "run-1", when=when, ended="2026-12-01", tags=tags)
    for folder in ("an earlier end", "the earlier end"):  # before and after its own by name
        add(tmp_path, "run-1", folder, when=when, ended="2026-11-30", seconds=9.0)
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
    both = {"jobs": 2, "node_hours": 2.0, "usd": pytest.approx(12.0), "unpriced": 0}
    assert by_tag["team=nlp"] == both
    by_cluster = sum_by(found, "cluster")
    assert (by_cluster["other"]["usd"], by_cluster["other"]["unpriced"]) == (None, 1)
    by_owner = sum_by(found, "owner")
    assert (by_owner["ann"]["usd"], by_owner["ann"]["unpriced"]) == (pytest.approx(6.0), 1)
    assert list(sum_by(found, "month")) == ["2026-10", "2026-11", "2026-12"]
    assert {name: one["jobs"] for name, one in by_owner.items()} == {"ann": 2, "bob": 1}
    assert read_costs(tmp_path / "none") == ([], [])
