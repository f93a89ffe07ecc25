"""What the head decides about nodes whose time to live is over, and what it finds of their jobs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from provision.on_node import keeper, unfetched
from provision.on_node.keeper import ALL, HEAD, Decision, Facts, Job, decide, next_push

D, GRACE = 10_000.0, 1800.0
LATEST = D + GRACE
MODEL = Job("squad-1", loss="model", ended=D - 600)
SAFE = Job("squad-1", ended=D - 600, down_when_done=True)
LIMITED = Job("squad-2", queued="running", limited=True)


def look(
    after_s: float,
    *jobs: Job,
    latest: float = LATEST,
    queue: bool = True,
    grace: float = GRACE,
) -> Decision:
    return decide(Facts(D + after_s, D, latest, grace, jobs, queue, first_boot=100.0))


STALLED = LIMITED._replace(queued="waiting for lost nodes", stalled=D - 3600)
LATE = D + 9 * 3600
GATHERS = MODEL._replace(name="run-1", gathers=True)
ENDED = LIMITED._replace(queued="", loss="model", ended=D + 7200)


@pytest.mark.parametrize(
    ("after_s", "jobs", "latest", "hold"),
    [
        # What is only on the head holds it in the grace period.
        *((after_s, [MODEL], LATEST, "") for after_s in (-121, GRACE, 9999)),
        *((after_s, [MODEL], LATEST, HEAD) for after_s in (-120, 0, GRACE - 1)),
        (10, [MODEL._replace(loss="")], LATEST, ""),
        # The workers have output of their own, or a running job.
        (10, [MODEL, GATHERS], LATEST, ALL),
        (10, [Job("run-1", queued="running")], LATEST, ALL),
        (10, [Job("run-1", queued="waiting")], LATEST, ""),
        # A job with a limit holds all until the latest end.
        *((7200, [LIMITED._replace(queued=it)], LATE, ALL) for it in ("running", "waiting", "new")),
        (9 * 3600, [LIMITED], LATE, ""),
        # One that waits for `repair` holds them for the grace period.
        (GRACE - 1, [STALLED], LATE, ALL),
        (GRACE, [STALLED], LATE, ""),
        (7200 + GRACE - 1, [STALLED._replace(stalled=D + 7200)], LATE, ALL),
        (7200 + GRACE, [STALLED._replace(stalled=D + 7200)], LATE, ""),
        # The grace period begins with its end.
        (7200 + GRACE - 1, [ENDED], LATE, HEAD),
        (7200 + GRACE, [ENDED], LATE, ""),
        (7500, [ENDED], D + 7400, ""),
    ],
)
def test_what_is_held_and_until_when(
    after_s: float, jobs: list[Job], latest: float, hold: str
) -> None:
    assert look(after_s, *jobs, latest=latest).hold == hold


@pytest.mark.parametrize("grace", [0, 300])
def test_a_short_grace_period_does_not_end_a_job_whose_node_reboots(grace: float) -> None:
    assert look(1799, STALLED, latest=LATE, grace=grace).hold == ALL
    assert look(1800, STALLED, latest=LATE, grace=grace).hold == ""
    assert look(600, STALLED, latest=D + 900, grace=grace).until == D + 900


@pytest.mark.parametrize(
    "jobs",
    [
        # Another job, or a loss.
        *([SAFE, Job("squad-2", queued=queued)] for queued in ("running", "waiting", "new")),
        [SAFE, Job("squad-2", loss="model", ended=50)],
        [SAFE._replace(loss="model")],
        # It came with an image, or with the copies of a lost head's jobs.
        [SAFE._replace(ended=90)],
        [SAFE._replace(ended=0)],
        # Nobody asked for it.
        [MODEL._replace(loss="")],
    ],
)
def test_the_nodes_end_only_with_a_job_of_this_machine_that_is_done_and_safe(
    jobs: list[Job],
) -> None:
    assert look(-5000, *jobs).off == ""
    assert look(-5000, SAFE, queue=False).off == ""
    assert look(-5000, SAFE).off == "job squad-1 is done (--down-when-done)"


def test_pushes_are_tried_again_after_longer_and_longer_pauses() -> None:
    times = [next_push(tried, 1000, 500) - 1000 for tried in range(1, 8)]

    assert next_push(0, 0, 500) == 545
    assert times == [60, 120, 240, 480, 900, 900, 900]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '7|RUNNING|node0|None|busy'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(keeper, "HOME", tmp_path)
    monkeypatch.setattr(keeper, "STATE", tmp_path)
    (tmp_path / "expiry").touch()  # written at every boot
    monkeypatch.setattr(keeper, "FIRST_BOOT", tmp_path / "fresh")
    (tmp_path / "fresh").touch()
    os.utime(tmp_path / "fresh", (time.time() - 3600,) * 2)
    return tmp_path / "spr-jobs"


LAUNCH = Path(__file__).parents[2] / "jobs/places/golden/launch.json"


def make(
    jobs: Path,
    name: str,
    *files: str,
    ago_s: float = 60,
    asks: str = "",
    bucket: str = "",
    **record: object,
) -> Path:
    """Make a job's folder. ``asks`` is an option in its launch."""
    texts = {"job.json": json.dumps(record)} | dict.fromkeys(files, "{}")
    if asks or bucket:
        launch = json.loads(LAUNCH.read_text())
        assert launch["spec"]["ending"][asks or "max_time_s"] in (False, 0.0)
        assert launch["spec"]["storage"]["bucket"] == ""
        launch["spec"]["ending"][asks] = 60.0 if asks == "max_time_s" else True
        launch["spec"]["storage"]["bucket"] = bucket
        texts |= {"run.sh": "", "launch.json": json.dumps(launch)}
    for path, text in texts.items():
        (jobs / name / path).parent.mkdir(parents=True, exist_ok=True)
        (jobs / name / path).write_text(text)
        os.utime(jobs / name / path, (time.time() - ago_s,) * 2)
    return jobs / name


def gather() -> dict[str, Job]:
    facts = keeper.gather(time.time(), D, LATEST, GRACE)
    assert facts.queue
    return {job.name: job for job in facts.jobs}


def test_facts_of_jobs_come_from_their_folders(jobs: Path) -> None:
    make(jobs, "busy", "output/rank-0.json", asks="max_time_s")
    make(jobs, "new")
    model = ("end.json", "output/model/config.json")
    make(jobs, "done", *model, asks="down_when_done", gather_output=True)
    make(jobs, ".marks")
    make(jobs, "stopped", "end.json", "cancelled", asks="down_when_done")

    found = gather()

    assert set(found) == {"busy", "new", "done", "stopped"}
    assert not found["stopped"].down_when_done
    assert found["busy"] == Job("busy", "running", "results", limited=True)
    assert found["new"] == Job("new", "new")
    done = found["done"]
    assert done[:3] == ("done", "", "model")
    assert (done.gathers, done.down_when_done, done.bucket) == (True, True, "")
    assert 59 <= time.time() - done.ended < 600


def test_a_job_may_be_running_while_the_queue_does_not_answer(jobs: Path) -> None:
    (jobs.parent / "squeue").write_text("#!/bin/sh\nexit 1\n")
    make(jobs, "busy", asks="max_time_s")
    make(jobs, "done", "end.json", asks="max_time_s")
    facts = keeper.gather(time.time(), D, LATEST, GRACE)
    assert not facts.queue
    assert {job.name: job.queued for job in facts.jobs} == {"busy": "running", "done": ""}
    assert decide(facts._replace(now=D + GRACE + 1, latest=D + 9000)).hold == ALL


def test_a_job_waits_for_lost_nodes_since_the_keeper_saw_it(jobs: Path) -> None:
    make(jobs, "busy", asks="max_time_s")
    make(jobs, "next", asks="max_time_s")
    head, text = keeper.Keeper([]), "7|PENDING||ReqNodeNotAvail, UnavailableNodes:node1|busy"
    now, then = time.time(), "8|PENDING||Priority|next"

    def hold(after_s: float, *states: str, code: int = 0) -> bool:
        lines = "\n".join(states)
        (jobs.parent / "squeue").write_text(f"#!/bin/sh\necho '{lines}'\nexit {code}\n")
        head.act(keeper.gather(now + after_s, now - 9000, now + 9000, GRACE))
        return head.is_holding

    assert hold(0, text)
    assert hold(GRACE - 1, text, then)
    assert hold(GRACE, "7|RUNNING|node0|None|busy", then)
    assert hold(GRACE + 1, text, then)
    # Slurm fails, or names another reason for a moment.
    assert hold(GRACE + 31, code=1)
    assert hold(GRACE + 61, text.replace("ReqNodeNotAvail", "Priority"), then)
    assert hold(2 * GRACE, text, then)
    assert not hold(2 * GRACE + 1, text, then)
    assert hold(2 * GRACE + 2, "8|RUNNING|node0|None|next", text)
    # It failed, and starts again in a moment.
    assert hold(2 * GRACE + 60, "8|PENDING||BeginTime|next", text)


def test_for_the_laptop_a_job_that_waits_for_lost_nodes_is_waiting(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(jobs.parent))
    (jobs.parent / "squeue").write_text("#!/bin/sh\necho '7|PENDING||PartitionConfig|busy'\n")

    unfetched.main()

    assert capsys.readouterr().out == "\nwaiting busy\n"


def test_what_would_be_lost_and_what_is_stored(jobs: Path) -> None:
    make(jobs, "run-1", "end.json", "output.state/checkpoints/step-000001/state")
    make(jobs, "run-2", "end.json", "output/checkpoints/step-000001/state")  # the user's own
    state = ("end.json", "output.state/checkpoints/step-000007/state")
    stored = make(jobs, "squad-1", *state, resumable=True, bucket="s3://team")
    (stored / "fetched").touch()  # a fetch brings no checkpoint
    lost = make(jobs, "run-3", "end.json", bucket="s3://team")  # a lost head had its files
    resumed = make(jobs, "run-4", "end.json", "run.sh")  # without its bucket
    (resumed / "job.json").write_text('{"bucket": "s3://team"}')
    assert not keeper._is_pending(resumed)
    found = gather()
    losses = {"run-1": "", "run-2": "results", "squad-1": "checkpoint", "run-3": "", "run-4": ""}
    assert {name: each.loss for name, each in found.items()} == losses
    buckets = {name: each.bucket for name, each in found.items() if each.bucket}
    assert buckets == {"squad-1": "s3://team/squad-1"}
    argv = keeper.render_push(found["squad-1"])
    assert argv[-2:] == [str(stored), "s3://team/squad-1"]
    assert "EnvironmentFile=-/etc/environment" in argv  # its region

    (lost / "log").touch()
    assert gather()["run-3"].loss == "log"
    for job in (stored, lost):
        (job / "pushed.json").touch()
    found = gather()
    assert (found["squad-1"].loss, found["squad-1"].bucket, found["run-3"].loss) == ("", "", "")


def test_of_hundreds_of_jobs_only_those_with_changed_work_cost_a_program(
    jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(jobs, "run-1", "end.json", "output.state/started", "work/train.py")
    asked = Mock(return_value=True)
    monkeypatch.setattr(unfetched, "_has_newer_work", asked)
    assert (unfetched.find_loss(job), asked.call_count) == ("results", 1)
    (job / "fetched").touch()
    os.utime(job / "fetched", (time.time() + 1,) * 2)
    assert (unfetched.find_loss(job), asked.call_count) == ("", 1)


def test_the_events_of_a_hold_are_written_once(jobs: Path) -> None:
    (jobs.parent / "hosts").write_text("node0\n")
    jobs.mkdir()
    now = time.time()
    facts = Facts(now, now - 10, now + 60, 60, (MODEL._replace(ended=now - 90),))
    for _ in range(2):
        keeper.Keeper([]).act(facts)
    assert (jobs.parent / "hold").exists()
    keeper.Keeper([]).act(facts._replace(jobs=()))

    lines = (jobs / ".events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["held", "released", "powering off"]
    assert events[0]["text"].endswith("only on the nodes: the model of squad-1")
    assert not (jobs.parent / "hold").exists()


@pytest.mark.parametrize(
    ("files", "asks", "bucket", "is_pending"),
    [
        (("end.json",), "", "", False),
        ((), "down_when_done", "s3://team", False),
        (("end.json",), "down_when_done", "", True),
        (("end.json",), "", "s3://team", False),  # a lost head had its files
        (("end.json", "log"), "", "s3://team", True),
        (("end.json", "pushed.json"), "", "s3://team", False),
    ],
)
def test_far_from_the_deadline_only_ended_jobs_with_something_to_do_are_looked_at(
    jobs: Path, files: tuple[str, ...], asks: str, bucket: str, is_pending: bool
) -> None:
    assert keeper._is_pending(make(jobs, "squad-1", *files, asks=asks, bucket=bucket)) is is_pending


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ("Name=squad-1 JobState=NODE_FAIL ", "NODE_FAIL"),
        ("Name=squad-1 JobState=FAILED ", "FAILED"),  # `kill -9 -1` in a rank
        ("Name=squad-10 JobState=FAILED ", None),
        ("Name=busy JobState=FAILED ", None),  # requeued
        ("Name=stopped JobState=CANCELLED ", None),
        ("Name=again JobState=FAILED ", None),  # submitted again, and not begun
    ],
)
@pytest.mark.parametrize("is_from_image", [False, True])
def test_a_job_that_slurm_ended_without_a_record_is_finished(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, record: str, state: str | None, is_from_image: bool
) -> None:
    ended, run = jobs.parent / "jobs.txt", list[list[str]]()
    ended.write_text(f"JobId=7 UserId=u(1) GroupId=u(1) {record}Partition=cluster\n")
    monkeypatch.setattr(keeper, "ENDED_JOBS", ended)
    monkeypatch.setattr(keeper, "_ask", run.append)
    if is_from_image:
        (jobs.parent / "fresh").touch()
    for name in ("squad-1", "busy"):
        job = make(jobs, name, "begin.json", "run.sh")
        (job / "begin.json").write_text('{"nodes": ["node1", "node0"], "attempt": 2}')
        os.utime(job / "begin.json", (time.time() - 60,) * 2)  # before a reboot
    make(jobs, "stopped", "begin.json", "run.sh", "cancelled")
    make(jobs, "again", "run.sh")

    keeper.finish_lost_jobs()

    assert len(run) == (state is not None and not is_from_image)
    for argv in run:
        there, _, here = argv[-1].partition("; [ $? != 255 ] || ")
        assert argv[1:4] == ["--quiet", "--collect", "--unit=spr-cluster-end-squad-1"]
        known = f"env SLURM_JOB_ID=7 SLURM_RESTART_COUNT=1 SPR_ENDED={state} SLURM_JOB_NODELIST="
        script = f"bash {jobs}/squad-1/run.sh 137"
        assert there == f"ssh -o ConnectTimeout=10 node1 '{known}node1,node0 {script}'"
        assert here == f"{known}node0 {script}"


def test_variables_of_a_job_that_was_never_submitted_are_removed(
    jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_on_head", lambda: True)
    monkeypatch.setattr(keeper, "_ask", lambda _: "1 2 3")
    (jobs.parent / "hosts").touch()
    for name, ago_s in (("young", 10), ("old", 700)):
        make(jobs, name, "environment.json.0fa", ago_s=ago_s)
    keeper.main()
    assert [path.parent.name for path in jobs.glob("*/environment.json.0fa")] == ["young"]
