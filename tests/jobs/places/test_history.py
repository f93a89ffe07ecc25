"""The jobs on a head, listed by the real program in this machine's Python."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.cli.jobs import render
from jobs.places.launcher import JobSummary, choose_active, choose_job
from jobs.places.queue.history import list_jobs, parse_jobs
from jobs.worker.runtime.events import mark_of, render_event
from tests.jobs.context import listed
from tests.jobs.places.this_machine import ThisMachine

BEGUN = {"began": 1000.5, "nodes": ["node0", "node1"], "ranks_per_node": 2, "attempt": 1}


def make_job(home: Path, name: str, **files: object) -> Path:
    """A job's folder on the head; ``files`` are the content of its JSON files."""
    folder = home / "spr-jobs" / name
    (folder / "output").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/bash\n")
    # Its submission counts, not its name.
    number = int(name.rpartition("-")[2])
    os.utime(folder / "run.sh", (1000 * number, 1000 * number))
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def queued(head: ThisMachine, jobs: Mapping[str, tuple[str, str]]) -> None:
    """Let squeue print these states and reasons of jobs by their names."""
    rows = "".join(f"{state}|{why}|node[0-1]|{name}\n" for name, (state, why) in jobs.items())
    head.write_program("squeue", f"cat <<'END'\n{rows}END\n")


def test_each_job_is_listed_with_its_state(head: ThisMachine) -> None:
    ended = {**BEGUN, "ended": 1060, "exit_code": 0}
    failed = {**ended, "state": "failed", "exit_code": 9, "rank": 3, "host": "b", "message": "NaN"}
    done = make_job(head.home, "squad-1", begin=BEGUN, end={**ended, "state": "succeeded"})
    (done / "output/model").mkdir()
    (done / "output/model/config.json").write_text("{}")
    make_job(head.home, "run-2", begin=BEGUN, end=failed)
    make_job(head.home, "squad-3", begin=BEGUN)
    make_job(head.home, "squad-4", begin=BEGUN)
    make_job(head.home, "squad-5", begin=BEGUN)
    make_job(head.home, "squad-6")
    (make_job(head.home, "squad-7") / "cancelled").touch()
    make_job(head.home, "squad-8", begin=BEGUN)
    running = {"squad-4": ("RUNNING", "None"), "squad-8": ("COMPLETING", "None")}
    waiting = {"squad-5": ("PENDING", "BeginTime"), "squad-6": ("PENDING", "Resources")}
    queued(head, {**running, **waiting, "a|user's own": ("RUNNING", "None")})

    found = {job.job: job for job in list_jobs(head)}

    assert [(job.job, job.state, job.waits_for) for job in found.values()] == [
        ("squad-1", "succeeded", ""),
        ("run-2", "failed", ""),
        ("squad-3", "lost", ""),
        ("squad-4", "running", ""),
        ("squad-5", "requeued", "BeginTime"),
        ("squad-6", "queued", "Resources"),
        ("squad-7", "cancelled", ""),
        ("squad-8", "running", ""),
    ]
    assert [job.job for job in found.values() if job.is_active] == [
        *("squad-4", "squad-5", "squad-6", "squad-8")
    ]
    bad = found["run-2"]
    assert (bad.exit_code, bad.rank, bad.host, bad.message) == (9, 3, "b", "NaN")
    assert (bad.nodes, bad.ranks_per_node, bad.attempt) == (("node0", "node1"), 2, 1)
    times = [job.began and job.began.timestamp() for job in found.values()]
    assert times == [*[1000.5] * 5, None, None, 1000.5]
    assert [job.submitted.timestamp() for job in found.values()] == [
        1000 * number for number in range(1, 9)
    ]
    assert [job.ended is None for job in found.values()] == [False, False, *[True] * 6]
    assert all((job.size_kib or 0) > 0 for job in found.values())
    assert [job.job for job in found.values() if job.has_model] == ["squad-1"]


def test_a_job_whose_files_were_on_a_lost_head_says_so(head: ThisMachine) -> None:
    """A new head has a job's marks; as a worker before, also its record and code."""
    ended = {**BEGUN, "ended": 1060, "exit_code": 0, "state": "succeeded"}
    launch = {"spec": {"storage": {"bucket": "s3://results/team"}}}
    make_job(head.home, "squad-1", end=ended, launch=launch)
    make_job(head.home, "squad-2", end=ended, job={"command": "x"})
    os.utime(make_job(head.home, "squad-3"), (1000, 1000))
    (make_job(head.home, "squad-4", end=ended, job={}, launch=launch) / "log").touch()
    make_job(head.home, "squad-5", end={"state": "cancelled"}, job={})
    make_job(head.home, "squad-6")
    # It ran on the lost head, and was not to run again.
    own = make_job(head.home, "squad-7", first={}, job={"resumable": True}, launch=launch)
    os.utime(own, (1000, 1000))
    queued(head, {"squad-6": ("PENDING", "None")})

    jobs = list_jobs(head)
    found = {job.job: (job.on_lost_head, job.bucket) for job in jobs}
    assert not any(job.unfinished for job in jobs)  # there is nothing to resume here

    there = "s3://results/team"
    lost = {"squad-1": (True, there), "squad-2": (True, ""), "squad-3": (True, "")}
    lost["squad-7"] = (True, there)
    others = {"squad-4": (False, there), "squad-5": (False, ""), "squad-6": (False, "")}
    assert found == lost | others


def test_a_job_on_its_way_into_the_queue_is_not_lost(head: ThisMachine) -> None:
    cases: list[tuple[list[str], int, str]] = [
        ([], 1700, "submitting"),
        ([], 1900, "lost"),
        (["run.sh", "run.sh.k3f"], 1700, "submitting"),
        (["run.sh"], 5, "submitting"),
        (["run.sh"], 60, "lost"),
        (["run.sh", "begin.json"], 5, "lost"),
        (["end.json"], 5, "lost"),
        (["cancelled"], 5, "cancelled"),
    ]
    for number, (names, age_s, _) in enumerate(cases):
        folder = make_job(head.home, f"squad-{number}")
        (folder / "run.sh").unlink()
        for name in names:
            (folder / name).touch()
        os.utime(folder, (time.time() - age_s,) * 2)

    found = {job.job: (job.state, job.is_active) for job in list_jobs(head)}
    assert found == {
        f"squad-{number}": (state, state == "submitting")
        for number, (*_, state) in enumerate(cases)
    }


def test_jobs_are_listed_while_slurm_does_not_answer(head: ThisMachine) -> None:
    make_job(head.home, "squad-1", begin=BEGUN)
    make_job(head.home, "squad-2")
    make_job(head.home, "squad-3", end={"state": "failed", "exit_code": 1})
    (head.slurm / "down").touch()

    assert [(job.state, job.waits_for) for job in list_jobs(head)] == [
        ("running", "Slurm does not answer"),
        ("queued", "Slurm does not answer"),
        ("failed", ""),
    ]


def test_a_damaged_file_is_none(head: ThisMachine) -> None:
    assert list_jobs(head) == ()
    (head.home / "spr-jobs").mkdir()
    (head.home / "spr-jobs" / "a file").touch()
    assert list_jobs(head) == ()
    for job, text in (("squad-1", "{"), ("squad-2", "[]"), ("squad-3", '{"state": 3}')):
        folder = make_job(head.home, job)
        for name in ("begin.json", "end.json"):
            (folder / name).write_text(text)
    assert [(job.state, job.nodes) for job in list_jobs(head)] == [("lost", ())] * 3


def test_unknown_lines_are_skipped() -> None:
    odd: tuple[dict[str, Any], ...] = (
        {"submitted": 9e18},
        {"size_kib": "four"},
        {"job": "../../x"},
        {"job": "$(id)"},
        {"end": {}, "queue": ["PENDING"]},
        {"end": {}, "begin": {"began": "x"}},
        {"begin": []},
    )
    for wrong in (
        "Last login: Sat Nov 21 05:49:12 2026 from 192.0.2.1 on pts/0",
        "{}",
        "[1]",
        "\x00" * 9,
        "[" * 10**5,
        *(json.dumps({**json.loads(listed("squad-1")), **change}) for change in odd),
    ):
        assert parse_jobs(f"{wrong}\n") == (), wrong
    (found,) = parse_jobs("Welcome\n" + listed("squad-1", end={}))
    assert (found.job, found.state, found.began, found.nodes) == ("squad-1", "lost", None, ())


def job(name: str, state: str = "failed", **more: Any) -> JobSummary:
    at = datetime(2026, 7, 31, tzinfo=timezone.utc)
    return JobSummary(state, job=name, submitted=at, **more)


def test_the_only_active_job_is_the_default() -> None:
    over, runs = job("a", "lost"), job("b", "running")
    assert choose_job((over, runs), None) == runs
    with pytest.raises(UsageError, match="there is no job on the head"):
        choose_job((), None)
    with pytest.raises(UsageError, match="there is no job c on the head") as caught:
        choose_job((over, runs), "c")
    assert caught.value.hint == "the last ones are a, b"
    assert (
        choose_active((over, runs), None) == choose_active((over, runs), None, every=True) == [runs]
    )
    assert choose_active((over, runs), "a") == [over]
    assert choose_active((over,), None) == []
    with pytest.raises(UsageError, match="2 jobs are running or queued") as caught:
        choose_active((over, runs, job("c", "requeued")), None)
    assert caught.value.hint == "name one of them: b, c"


def test_training_progress_is_read_from_the_job_folder(head: ThisMachine) -> None:
    make_job(head.home, "bench-0")
    for name in ("squad-1", "squad-2", "squad-3"):
        folder = make_job(head.home, name, job={"resumable": True})
        (folder / "output.state/checkpoints").mkdir(parents=True)
    (head.home / "spr-jobs/squad-2/output/results.json").write_text("{}")
    # A checkpoint is one when its folder has its final name; their numbers outgrow their digits.
    for name in ("step-999999", "step-1000000", "step-2000000.partial"):
        (head.home / "spr-jobs/squad-3/output.state/checkpoints" / name).mkdir()

    found = list_jobs(head)

    assert [(each.job, each.unfinished, each.checkpoint) for each in found] == [
        ("bench-0", False, None),
        ("squad-1", True, None),
        ("squad-2", False, None),
        ("squad-3", True, "step-1000000"),
    ]


def test_the_end_of_training_follows_from_its_last_step(head: ThisMachine) -> None:
    launch = {"spec": {"ending": {"budget": 9.0, "max_time_s": 7100.0}}}
    spent = {"spent": {"seconds": 100.0, "usd": 2.5}}
    job_file = {"usd_per_hour": 36.0, "nnodes": 4, "more": spent}
    begin = {**BEGUN, "first": 900.0, "starts": [[900.0, 4], [1000.5, 2]]}
    folder = make_job(head.home, "squad-1", begin=begin, launch=launch, job=job_file)
    queued(head, {"squad-1": ("RUNNING", "None")})
    mark = mark_of("squad-1")
    step: dict[str, Any] = {"event": "step", "at": 2000, "step": 7, "total": 9, "epoch": 1.0}
    step |= {
        "loss": 0.5,
        "lr": 0.1,
        "samples_per_second": 2.0,
        "tokens_per_second": 2.0,
        "eta_seconds": 60.5,
        "shares": {},
    }
    others = {**step, "eta_seconds": 1}
    begun = {**step, "event": "evaluating"}
    lines = [render_event(step, mark), render_event(begun, mark)]
    lines += [render_event(others, mark_of("squad-2")), "@spr"]
    (folder / "log").write_text("x" * 70_000 + "\n" + "\n".join(lines) + "\n")

    (job,) = list_jobs(head)
    assert job.expected_end == datetime.fromtimestamp(2060.5, timezone.utc)
    now, expires = (datetime.fromtimestamp(at, timezone.utc) for at in (2000, 2060))
    assert "after its nodes shut down" in render([job], now, expires)
    # For this job, which has a limit, they stay.
    assert "after its nodes" not in render([job], now, expires, now.replace(minute=59))
    assert job.max_time_s == 7200.0
    assert "after its nodes" not in render([job], now)
    # For a cent a second and node, since the first start, with the run that it resumes, at its own price.
    assert render([job], now).endswith(" UTC (in 1 min); $26.51 spent, $27.72 expected, $0.00 left")
    assert job.spending(datetime.fromtimestamp(1100, timezone.utc)).as_dict() == {
        "usd_spent": 8.51,
        "usd_expected": 27.72,
        "usd_left": 0.49,
    }

    with (folder / "log").open("a") as log:
        log.write(render_event({"event": "phase", "name": "evaluate", "at": 2001}, mark) + "\n")
    (job,) = list_jobs(head)
    assert job.expected_end is None

    # What it has cost until it was lost is unknown.
    assert "spent" not in render([replace(job, state="lost")], now)
    assert [*replace(job, state="lost").spending(now).as_dict().values()] == [None] * 3


def test_an_array_is_one_row_with_its_last_progress(head: ThisMachine) -> None:
    folder, mark = make_job(head.home, "run-1", begin=BEGUN), mark_of("run-1")
    known = [{"event": "elements", "done": n, "failed": n // 2, "total": 100} for n in (1, 37)]
    lines = [*(render_event(each, mark) for each in known), "text"]
    (folder / "log").write_text("\n".join(lines) + "\n")
    make_job(head.home, "run-2")
    found = list_jobs(head)
    assert [job.progress for job in found] == ["37 of 100 done, 18 failed", ""]
    shown = render(found, datetime.fromtimestamp(2000, timezone.utc)).splitlines()
    assert shown[0].split()[-1] == "ELEMENTS"
    assert shown[1].endswith(" 37 of 100 done, 18 failed")
    assert len(shown) == 3
    assert "ELEMENTS" not in render(found[1:], datetime.fromtimestamp(2000, timezone.utc))
