"""The log of a job or of one rank, read by the real shell commands in this machine's bash."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.places.launcher import JobSummary
from jobs.places.plan import JobPaths
from jobs.places.queue.history import find_node, read_element, read_log
from tests.jobs.places.this_machine import ThisMachine, submit, wait_for

AT = datetime(2026, 7, 31, tzinfo=timezone.utc)
JOB = JobSummary(
    "succeeded", job="squad-1", submitted=AT, nodes=("node2", "node0"), ranks_per_node=2
)


def read(head: ThisMachine, job: JobSummary, rank: int | None = None, **more: bool) -> list[str]:
    lines: list[str] = []
    read_log(head, job, lines.append, rank, **more)
    return lines


def write_log(head: ThisMachine, job: JobSummary, text: str) -> None:
    log = Path(JobPaths(job.job, str(head.home)).log)
    log.parent.mkdir(parents=True)
    log.write_text(text)


@pytest.fixture(autouse=True)
def home(head: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "jobs.places.queue.history.JobPaths", lambda job: JobPaths(job, str(head.home))
    )


@pytest.mark.parametrize("follow", [False, True])
def test_the_log_of_a_job_that_is_over(head: ThisMachine, follow: bool) -> None:
    text = "".join(f"line {number}\n" for number in range(5000))
    write_log(head, JOB, text + "the last")
    (head.home / "spr-jobs/squad-1/log.earlier").write_text("of an earlier run\n")
    found = read(head, JOB, follow=follow)
    assert found == ["of an earlier run", *text.splitlines(), "the last"]


def test_a_rank_is_followed_on_its_node(head: ThisMachine) -> None:
    there = head.connect("node1", "node2") / "spr-jobs/squad-1/output.state/logs"
    there.mkdir(parents=True)
    log = there / "rank-1.log"
    log.write_text("begun\n")
    submit(head, "sleep 60")
    lines: list[str] = []
    job = replace(JOB, state="running")
    assert read(head, job, 0) == [], "it has printed nothing"
    reader = threading.Thread(
        target=read_log, args=(head, job, lines.append, 1), kwargs={"follow": True}
    )
    reader.start()
    wait_for(lambda: lines == ["begun"])
    with log.open("a") as file:
        file.write("more\n")
    wait_for(lambda: lines == ["begun", "more"])
    head.slurm_command("scancel", "1")
    reader.join(50)
    assert read(head, JOB, 1) == lines, "also when it is over"
    wait_for(lambda: not head.processes())


def test_ranks_are_on_the_jobs_nodes_in_their_order() -> None:
    assert [find_node(JOB, rank) for rank in range(4)] == ["node2", "node2", "node0", "node0"]
    for rank in (-1, 4):
        with pytest.raises(UsageError, match=f"--rank {rank}: job squad-1 has the ranks 0 to 3"):
            find_node(JOB, rank)
    with pytest.raises(UsageError, match="job squad-1 has not started yet: it is queued"):
        find_node(replace(JOB, state="queued", nodes=()), 0)


def test_the_log_of_an_element_comes_from_a_node_that_has_it(head: ThisMachine) -> None:
    job = replace(JOB, nodes=("node2", "node1"))
    first = head.connect("node2") / "spr-jobs/squad-1/output.state/logs"
    second = head.connect("node1") / "spr-jobs/squad-1"
    first.mkdir(parents=True)
    (second / "elements/7").mkdir(parents=True)
    (first / "element-3.log").write_text("of element 3\n")
    (first / "trial-4.log").write_text("of trial 4\n")
    (second / "elements/7/log").write_text("still running\n")
    for number, text in ((3, "of element 3"), (4, "of trial 4"), (7, "still running")):
        lines: list[str] = []
        read_element(head, job, lines.append, number)
        assert lines == [text]
    with pytest.raises(UsageError, match="--element 8: job squad-1 has no such element or trial"):
        read_element(head, job, lines.append, 8)
