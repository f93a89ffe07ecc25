"""The record of a job: where it may run, and once it has ended, where and how it did."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.places.launcher import JobEnd, parse_end
from jobs.places.plan import RECORD, own_folder
from jobs.places.record import complete_record, read_job_id
from jobs.report.receipt import make_receipt
from jobs.report.results_folder import Run
from jobs.worker.runtime.cores import CoreShare
from jobs.worker.spec import PlacementOptions
from tests.harness.json_output import require_schema
from tests.jobs.context import SUBMITTED

AT = datetime(2026, 7, 31, 14, 25, 1, tzinfo=timezone.utc)
END = JobEnd("failed", 3, AT, AT.replace(second=9), ("node0", "node2"), 2, 1, "ip-6", "NaN")
STARTS = ((AT.timestamp() - 300, 3), (AT.timestamp(), 2))


def test_a_record_has_the_form_of_what_a_command_prints() -> None:
    share = CoreShare((0,), (1,), None)
    placement = replace(SUBMITTED.placement, shares=((share,),))
    options = PlacementOptions("auto", 2, 1)
    more = {"files": 1, "bytes": 9, "folders": {}, "env": [], "results": "x"}
    more |= {"packages": None, "outputs": None}
    known = replace(SUBMITTED, placement=placement, options=options, nodes=(), more=more)
    require_schema(["run"], json.loads(replace(known, billed=None).render()))


def test_a_job_that_has_ended_names_its_own_nodes_and_cores() -> None:
    done = SUBMITTED.ended_as(END)
    assert [node["instance"] for node in done.nodes] == ["i-0", "i-2"]
    assert [share.cpus for (share,) in done.placement.shares] == [(0,), (2,)]
    assert (done.state, done.exit_code, done.seconds) == ("failed", 3, 8.0)
    assert (done.ended, done.earlier_s) == ("2026-07-31T14:25:09+00:00", 0.0)
    first = replace(END, first=AT - timedelta(minutes=5))
    later = SUBMITTED.ended_as(first)
    assert (later.earlier_s, later.earlier_node_s) == (300.0, 600.0)
    assert SUBMITTED.ended_as(replace(first, starts=STARTS)).earlier_node_s == 900.0
    # One that was canceled before it began keeps all.
    unpinned = replace(SUBMITTED.placement, shares=())
    done = replace(SUBMITTED, placement=unpinned).ended_as(JobEnd("cancelled"))
    assert (len(done.nodes), done.placement.shares, done.ended, done.seconds) == (3, (), None, None)


@pytest.mark.parametrize(
    ("boot", "price", "nodes", "node_s"),
    [
        (0.0, 6.5, 3, 3 * 330 + 2 * 8),
        (60.0, 6.5, 3, 3 * (330 + 60 + 92) + 2 * 8),  # it waited for 92 s
        (0.0, 13.0, 1, (3 * 330 + 2 * 8) / 2),
    ],
)
def test_a_resumed_job_has_paid_for_all_of_its_runs(
    boot: float, price: float, nodes: int, node_s: float
) -> None:
    """Earlier runs on more nodes, or at a higher price or share, count as longer ones of this run."""
    ended = AT + timedelta(seconds=8)
    end = replace(END, ended=ended, first=AT - timedelta(minutes=5), starts=STARTS)
    when = ended - timedelta(seconds=400)
    first = replace(SUBMITTED, when=when.isoformat(), boot_s=boot, resumed_s=30, usd_per_hour=6.5)
    now = replace(SUBMITTED, nnodes=nodes, usd_per_hour=price, idle_s=90, former_s=9, when="now")
    now = replace(now, node_share=0.25)  # of larger nodes, its cores are a smaller share

    found = first.resumed_as(replace(now, argv=("new",), cluster="other"), end)

    assert found.resumed_s == pytest.approx(node_s / nodes / 0.25)
    here = {"cluster": "other", "usd_per_hour": price, "when": "now"}
    before = {"boot_s": 0.0, "idle_s": 90, "former_s": 9, "resumed_s": found.resumed_s}
    before |= {"run_nodes": nodes, "node_share": 0.25}
    assert found == replace(first, **here, **before)  # type: ignore[arg-type]


def test_a_run_on_fewer_nodes_counts_those_of_the_first_once() -> None:
    """Three nodes for an hour, then one for an hour, and for a minute before it."""
    hour = timedelta(hours=1)
    ends = [
        JobEnd("failed", 1, AT, AT + hour, ("node0", "node1", "node2")),
        JobEnd("failed", 1, AT + hour, AT + 2 * hour, ("node0",)),
    ]
    now = replace(SUBMITTED, nnodes=1, idle_s=60.0, when=(AT + hour).isoformat())
    resumed = SUBMITTED.resumed_as(now, ends[0])
    receipt = make_receipt(
        Run(Path(), {}, (), json.loads(resumed.ended_as(ends[1]).render())), None
    )
    assert receipt
    assert receipt.total_s == pytest.approx(4 * 3600 + 60)
    assert resumed.resumed_as(now, ends[1]).resumed_s == pytest.approx(4 * 3600 + 60)


def test_a_record_that_was_fetched_is_completed_once(tmp_path: Path) -> None:
    """The command that submitted the job wrote it before the job began."""
    own_folder(tmp_path).mkdir()
    (own_folder(tmp_path) / RECORD).write_text(SUBMITTED.render())
    end = json.dumps(END.as_dict())

    complete_record(tmp_path, "")
    assert json.loads((own_folder(tmp_path) / RECORD).read_text())["state"] == ""
    complete_record(tmp_path, end)
    complete_record(tmp_path, end.replace("failed", "succeeded"))

    kept = json.loads((own_folder(tmp_path) / RECORD).read_text())
    assert (kept["state"], kept["exit_code"], len(kept["nodes"])) == ("failed", 3, 2)
    assert read_job_id(tmp_path) == "squad-1"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": "squad-1"}'])
def test_a_damaged_record_stays_as_it_is(tmp_path: Path, text: str) -> None:
    complete_record(tmp_path, json.dumps(END.as_dict()))
    assert list(tmp_path.iterdir()) == []
    own_folder(tmp_path).mkdir()
    (own_folder(tmp_path) / RECORD).write_text(text)
    complete_record(tmp_path, json.dumps(END.as_dict()))
    assert (own_folder(tmp_path) / RECORD).read_text() == text


def test_an_end_round_trips_and_ignores_what_it_does_not_know() -> None:
    content = END.as_dict()
    assert parse_end(content) == parse_end(json.dumps({**content, "more": 1})) == END
    assert parse_end({}) is None
    assert parse_end("[" * 10**5) is None
