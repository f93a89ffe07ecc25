"""A job on a cluster whose time to live ends."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from infra.errors import HostError, JobError
from jobs.places.launcher import JobSummary
from jobs.places.plan import JobPlan
from jobs.places.queue.history import ExpiryWatch
from jobs.places.queue.session import attach, open_session
from jobs.places.record import CloudInfo
from tests.jobs.context import NOW as STARTED
from tests.jobs.context import (
    PATHS,
    SUBMITTED,
    ended,
    event,
    job_context,
    job_spec,
    listed,
    make_hosts,
)

NOW = datetime(2026, 11, 23, 14, tzinfo=timezone.utc)
EXTENDED = [None, NOW + timedelta(hours=2)]
FOUND = JobSummary("running", job=PATHS.job_id, submitted=NOW)
FIGURES = dict.fromkeys(("epoch", "loss", "samples_per_second", "tokens_per_second"), 1.0)


@pytest.mark.parametrize("stored", ["", "s3://results/team/squad-1"])
@pytest.mark.parametrize("extended", EXTENDED)
def test_a_user_is_warned_once_that_a_job_is_late_and_once_that_the_end_is_near(
    extended: datetime | None, stored: str
) -> None:
    shown: list[str] = []
    times = [NOW]
    watch = ExpiryWatch(
        NOW + timedelta(hours=1),
        "--name x",
        shown.append,
        lambda: extended,
        lambda: times[0],
        stored,
    )
    watch.see_eta(3000)
    watch.tick()
    assert shown == []
    for _ in range(2):
        watch.see_eta(5400)
    times = [NOW + timedelta(minutes=51)]
    for _ in range(2):
        watch.tick()
    ends = [text.splitlines()[-1].partition(": ")[2] for text in shown]
    commands = [f"spr-cluster extend {hours}h --name x" for hours in (1, 2)]
    assert ends == ([] if extended else commands)
    if not extended:
        assert "shut down at 15:00 UTC (in 1 h); the job would end at about 15:30 UTC" in shown[0]
        lost = "the job and its files end with them\n"
        kept = f"the job ends with them; what it has written is in {stored}\n"
        assert f"shut down at 15:00 UTC (in 9 min); {kept if stored else lost}" in shown[1]


@pytest.mark.parametrize("extended", EXTENDED)
def test_a_job_that_ended_with_its_cluster_says_so(
    extended: datetime | None, tmp_path: Path
) -> None:
    said = event(event="step", step=1, total=2, eta_seconds=60.0, shares={}, **FIGURES)
    hosts, log = make_hosts([said]), list[str]()
    lost = HostError("node0", "no SSH")
    hosts["node0"].answers[:0] = [("cat .*/end.json", lost)]
    past, later = (datetime.now(timezone.utc) + timedelta(minutes=n) for n in (-1, 120))
    context = job_context(hosts, log=log, find_expiry=lambda: later if extended else past)
    context = replace(context, cluster=replace(context.cluster, expires=past))
    message = r"\[node0\] no SSH" if extended else "whose time to live was over at .*: .* no SSH"
    with pytest.raises(HostError if extended else JobError, match=message) as caught:
        attach(context, FOUND, tmp_path)
    assert ("spr-cluster up --name bert" in str(caught.value)) is not bool(extended)
    assert any("warning: the nodes shut down" in line for line in log) is not bool(extended)


@pytest.mark.parametrize("is_limited", [False, True])
def test_nodes_that_stay_for_a_job_with_a_limit_do_not_warn_of_their_time_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_limited: bool
) -> None:
    tick_once = lambda _, tick: nullcontext(tick())  # noqa: E731
    monkeypatch.setattr("jobs.places.queue.session.note_silence", tick_once)
    said = event(event="step", step=1, total=2, eta_seconds=3600.0, shares={}, **FIGURES)
    hosts, log = make_hosts([said]), list[str]()
    hosts["node0"].answers.insert(0, ("cat .*/end.json", ended(nodes=["node0"])))
    soon, later = (datetime.now(timezone.utc) + timedelta(minutes=n) for n in (5, 120))
    context = job_context(hosts, log=log, find_job_end=lambda: later)
    context = replace(context, cluster=replace(context.cluster, expires=soon))

    attach(context, replace(FOUND, max_time_s=60.0 * is_limited, bucket="s3://b"), tmp_path)

    warned = "the job ends with them; what it has written is in s3://b/"
    assert any(warned in line for line in log) is not is_limited


@pytest.mark.parametrize(("hours", "is_late"), [(1.0, False), (0.1, True)])
def test_at_submission_an_earlier_job_with_the_same_command_tells_how_long_it_takes(
    hours: float, is_late: bool
) -> None:
    nodes = [node["name"] for node in SUBMITTED.nodes]

    def past(
        job: str,
        minutes: int,
        command: str = SUBMITTED.command,
        state: str = "succeeded",
        **more: Any,
    ) -> str:
        began = 1_800_000_000.0
        text = ended(nodes=nodes, began=began, ended=began + minutes * 60, state=state)
        return listed(job, command=command, end=json.loads(text), **more)

    rows = [
        past("squad-1", 20),
        past("squad-2", 10, spent_s=120.0),
        past("squad-3", 90, "other"),
        past("squad-4", 5, state="failed"),
        past("squad-5", 5, cores=1),
    ]
    hosts, log = make_hosts([]), list[str]()
    hosts["node0"].answers[:0] = [("# listing the jobs", "".join(rows))]
    context = job_context(hosts, log=log)
    ends = STARTED + timedelta(hours=hours)
    context = replace(context, cluster=replace(context.cluster, expires=ends))

    plan = JobPlan("squad", "worker.tasks", (), "gloo", command=SUBMITTED.argv)
    open_session(context).show_estimate(replace(plan, spec=job_spec(resumed_job="squad-2")))
    assert len(log) == 1
    open_session(context).show_estimate(plan)

    assert log[2] == "the same command took 16 min in the median of 2 jobs, 12 min to 20 min"
    warned = "".join(log[3:])
    assert ("the job would end at about 14:41 UTC, after that" in warned) is is_late
    assert ("spr-cluster extend 1h" in warned) is is_late


def _listing(*minutes: float) -> str:
    """Jobs that ended so many minutes before this one."""
    ends = [STARTED.timestamp() - 60 * each for each in minutes]
    rows = [listed(f"squad-{end}", end={"state": "failed", "ended": end}) for end in ends]
    return "".join(rows)


@pytest.mark.parametrize(
    ("listing", "boot", "idle"),
    [
        ("", 865, 0),
        (_listing(90, 30), 0, 30),
        (_listing(900), 865, 0),
        (_listing(90) + listed("squad-2", queue=["PENDING", "Resources", ""], end={}), 0, 0),
        (listed("squad-1", end={}, submitted=STARTED.timestamp() - 60), 0, 0),
    ],
    ids=["first", "later", "elsewhere", "waiting", "lost"],
)
def test_the_time_before_a_job_on_the_nodes_belongs_to_it(
    listing: str, boot: float, idle: float
) -> None:
    hosts, log, asked = make_hosts([]), list[str](), list[datetime | None]()

    def count_former_s(after: datetime | None) -> float:
        asked.append(after)
        return 90.0

    hosts["node0"].answers[:0] = [("# listing the jobs", listing)]
    cloud = CloudInfo(usd_per_hour=6.5)
    context = job_context(hosts, log=log, cloud=cloud, count_former_s=count_former_s)
    session = open_session(context)

    plan = JobPlan("squad", "worker.tasks", (), "gloo", command=SUBMITTED.argv)
    session.show_estimate(plan)

    known = {"boot_s": 60 * boot + 1} if boot else {"idle_s": 60 * idle} if idle else {}
    known |= {"former_s": 30.0} if known else {}
    assert session.unused == known
    assert asked[:1] == (
        [STARTED - timedelta(minutes=idle) if idle else None] if boot or idle else []
    )
    assert "3 nodes for $19.50 an hour on demand" in log
    session.show_estimate(replace(plan, spec=job_spec(cores=1)))
    assert "50.0% of 3 nodes for $9.75 an hour on demand" in log


@pytest.mark.parametrize("extended", EXTENDED)
def test_no_job_is_submitted_in_the_grace_period(extended: datetime | None) -> None:
    over = STARTED - timedelta(minutes=5)
    later = STARTED + timedelta(hours=2) if extended else over
    context = job_context(make_hosts([]), find_expiry=lambda: later)
    context = replace(context, cluster=replace(context.cluster, expires=over))
    if extended:
        open_session(context)
        return
    with pytest.raises(
        JobError, match=r"was over at 14:20 UTC: its nodes accept no new jobs"
    ) as refused:
        open_session(context)
    assert "spr-cluster extend 2h" in str(refused.value.hint)
