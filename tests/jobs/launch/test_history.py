"""The jobs on a head, listed by the real shell script in this machine's bash."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from infra.errors import JobError, UsageError
from jobs.launch.history import (
    JobSummary,
    check_job_id,
    choose_job,
    choose_unfinished,
    list_jobs,
    newest_model,
    parse_jobs,
)
from jobs.launch.plan import new_job_id
from tests.jobs.launch.test_launcher import ThisMachine


def make_job(home: Path, name: str, exit_code: str | None = None, model: bool = False) -> Path:
    folder = home / "spr-jobs" / name
    (folder / "output").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/bash\n")
    (folder / "pid").write_text("999999999\n")
    if exit_code is not None:
        (folder / "exit").write_text(exit_code)
    if model:
        (folder / "output" / "model").mkdir()
        (folder / "output" / "model" / "config.json").write_text("{}")
    return folder


def test_each_job_is_listed_with_its_state(tmp_path: Path) -> None:
    make_job(tmp_path, "squad-1", "0\n", model=True)
    make_job(tmp_path, "squad-2", "143\n")
    make_job(tmp_path, "squad-3")
    running = make_job(tmp_path, "squad-4")
    with subprocess.Popen(["sleep", "30"]) as other:
        # A PID that belongs to another process by now.
        (tmp_path / "spr-jobs/squad-3/pid").write_text(str(other.pid))
        script = f"exec -a {running}/run.sh sleep 30"
        with subprocess.Popen(["bash", "-c", script]) as job:
            (running / "pid").write_text(str(job.pid))
            found = list_jobs(ThisMachine(tmp_path))
            job.kill()
        other.kill()

    assert [(j.job, j.state, j.exit_code, j.has_model) for j in found] == [
        ("squad-1", "done", 0, True),
        ("squad-2", "failed", 143, False),
        ("squad-3", "lost", None, False),
        ("squad-4", "running", None, False),
    ]
    assert all(job.size_kib > 0 and job.began.year >= 2024 for job in found)
    assert [job.ended is None for job in found] == [False, False, True, True]


def test_jobs_of_the_same_second_have_ids_of_their_own_that_sort_by_time() -> None:
    code = (
        "from datetime import datetime; from jobs.launch.plan import new_job_id; "
        "print(new_job_id('squad', datetime(2026, 7, 31, 14, 25, 1)))"
    )
    ids = [subprocess.check_output([sys.executable, "-c", code], text=True).strip() for _ in "12"]

    assert len(set(ids)) == 2
    for job_id in ids:
        assert re.fullmatch(r"squad-20260731-142501-[a-z0-9]{3}", job_id)
        check_job_id(job_id)
    later = new_job_id("squad", datetime(2026, 7, 31, 14, 25, 2))
    assert sorted([later, *ids])[-1] == later


def test_a_head_without_jobs_has_none(tmp_path: Path) -> None:
    assert list_jobs(ThisMachine(tmp_path)) == ()
    (tmp_path / "spr-jobs").mkdir()
    assert list_jobs(ThisMachine(tmp_path)) == ()


def test_an_empty_exit_file_is_not_an_exit_code(tmp_path: Path) -> None:
    make_job(tmp_path, "squad-1", "")
    assert [job.state for job in list_jobs(ThisMachine(tmp_path))] == ["lost"]


def test_unknown_lines_are_skipped() -> None:
    good = "100 - 1 - 0 unfinished - 4 squad-1"
    for wrong in (
        "Welcome to Ubuntu",
        "Last login: Sat Nov 21 05:49:12 2026 from 192.0.2.1 on pts/0",
        good.replace("100", "9" * 18),
        good.replace("100", "-1"),
        good.replace(" 4 ", " four "),
        good.replace("squad-1", "../../x"),
        good.replace("squad-1", "$(id)"),
        "\x00" * 9,
    ):
        assert parse_jobs(f"{wrong}\n") == (), wrong
    assert parse_jobs("100 - 1 - 0 unfinished - 4 squad-1\n")[0].as_dict() == {
        "job": "squad-1",
        "state": "running",
        "exit_code": None,
        "began": "1970-01-01T00:01:40+00:00",
        "ended": None,
        "size_kib": 4,
        "has_model": False,
        "checkpoint": None,
        "unfinished": True,
    }


def job(
    name: str, *, has_model: bool = False, unfinished: bool = False, checkpoint: str = ""
) -> JobSummary:
    began = datetime(2026, 7, 31, tzinfo=timezone.utc)
    return JobSummary(name, "done", 0, began, began, 4, has_model, checkpoint, unfinished)


def test_a_job_is_chosen_by_its_id_or_is_the_newest() -> None:
    jobs = (job("a", has_model=True), job("b"))
    assert choose_job(jobs, "a").job == "a"
    assert choose_job(jobs, None).job == "b"
    assert newest_model(jobs).job == "a"
    with pytest.raises(UsageError, match="there is no job c on the head") as caught:
        choose_job(jobs, "c")
    assert caught.value.hint == "the last ones are a, b"
    with pytest.raises(UsageError, match="there is no job on the head"):
        choose_job((), None)
    with pytest.raises(JobError, match="no job on this cluster has a model"):
        newest_model((job("b"),))


def test_training_progress_is_read_from_the_job_folder(tmp_path: Path) -> None:
    make_job(tmp_path, "bench-0", "0\n")
    for name in ("squad-1", "squad-2", "squad-3"):
        folder = make_job(tmp_path, name, "1\n")
        (folder / "start.json").write_text("{}")
        (folder / "output" / "checkpoints").mkdir()
    (tmp_path / "spr-jobs/squad-2/output/results.json").write_text("{}")
    # A checkpoint is one when its folder has its final name; their numbers outgrow their digits.
    for name in ("step-999999", "step-1000000", "step-2000000.partial"):
        (tmp_path / "spr-jobs/squad-3/output/checkpoints" / name).mkdir()

    found = list_jobs(ThisMachine(tmp_path))

    assert [(each.job, each.unfinished, each.checkpoint) for each in found] == [
        ("bench-0", False, ""),
        ("squad-1", True, ""),
        ("squad-2", False, ""),
        ("squad-3", True, "step-1000000"),
    ]


JOBS = (job("squad-1", unfinished=True), job("squad-2"), job("squad-3", unfinished=True))


def test_the_last_unfinished_job_is_the_default() -> None:
    assert choose_unfinished(JOBS, None, "bert").job == "squad-3"
    assert choose_unfinished((*JOBS, job("squad-4")), None, "bert").job == "squad-3"
    failed_at_once = job("squad-5", checkpoint="", unfinished=True)
    kept = job("squad-4", checkpoint="step-000040", unfinished=True)
    assert choose_unfinished((kept, failed_at_once), None, "bert").job == "squad-4"
    assert choose_unfinished((failed_at_once,), None, "bert").job == "squad-5"
    assert choose_unfinished(JOBS, "squad-1", "bert").job == "squad-1"


@pytest.mark.parametrize(
    ("jobs", "job_id", "message", "hint"),
    [
        (
            JOBS,
            "squad-2",
            "job squad-2 has nothing to resume: it is finished, or not a training job",
            None,
        ),
        (
            JOBS,
            "squad-9",
            "there is no job squad-9 on the head",
            "the last ones are squad-1, squad-3",
        ),
        ((), "squad-9", "there is no job squad-9 on the head", "`spr-cluster jobs` lists all jobs"),
        (
            JOBS[1:2],
            None,
            "no unfinished training job on cluster bert",
            "`train squad` without --resume starts one",
        ),
    ],
)
def test_an_unsuitable_job_is_not_resumed(
    jobs: tuple[JobSummary, ...], job_id: str | None, message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_unfinished(jobs, job_id, "bert")
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize("name", ["", "../x", "a b", "$(id)", "-x", "a/b", "a\n", "é", "a" * 200])
def test_a_name_that_could_do_harm_in_a_command_is_not_a_job_id(name: str) -> None:
    with pytest.raises(UsageError, match="is not a job ID"):
        check_job_id(name)
