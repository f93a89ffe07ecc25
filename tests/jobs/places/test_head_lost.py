"""The jobs of a lost head, on the worker that becomes the head."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.slurm.job_queue import submit_again
from tests.jobs.places.this_machine import ThisMachine

_SCRIPT = """#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --nodes=1
#SBATCH --output=/dev/null
#SBATCH --{requeue}
sleep 60
"""


def leave(home: Path, job: str, age: int, *files: str, requeue: str = "requeue") -> None:
    """What a node has of a job that was submitted ``age`` seconds ago, and ended since."""
    folder = home / "spr-jobs" / job
    folder.mkdir(parents=True)
    script = folder / "run.sh"
    script.write_text(_SCRIPT.format(job=job, requeue=requeue))
    (folder / "launch.json").write_text(f"{age}")
    now = script.stat().st_mtime
    for path in (script, folder / "launch.json"):
        os.utime(path, (now - age, now - age))
    for name in files:
        (folder / name).write_text("{}")
        os.utime(folder / name, (now - age + 5, now - age + 5))


def test_jobs_that_had_not_ended_start_again_oldest_first(head: ThisMachine) -> None:
    assert submit_again(head) == ((), ())
    leave(head.home, "squad-new", 10)
    leave(head.home, "squad-old", 30)
    leave(head.home, "squad-ended", 40, "end.json")
    leave(head.home, "squad-cancelled", 50, "cancelled")
    leave(head.home, "run-once", 20, requeue="no-requeue")
    (Path(head.home, "spr-jobs") / "no-script").mkdir()

    assert submit_again(head) == (("squad-old", "squad-new"), ("run-once",))

    assert [name for name, _ in head.jobs_in_queue()] == ["squad-old", "squad-new"]
    # Interrupted and repeated, it submits nothing twice.
    assert submit_again(head)[0] == ("squad-old", "squad-new")
    assert len(head.jobs_in_queue()) == 2


@pytest.mark.parametrize("mark", ["end.json", "cancelled"])
def test_a_mark_on_any_node_that_answers_keeps_a_job_from_running_twice(
    head: ThisMachine, mark: str
) -> None:
    """The new head was cut off while the job ended."""
    node2 = head.connect("node1", "node2")
    (head.root / "node1").rmdir()
    leave(head.home, "run-1", 30)
    leave(node2, "run-1", 30, mark)

    assert submit_again(head) == ((), ())
    assert Path(head.home, "spr-jobs/run-1", mark).exists()


def test_a_mark_of_an_earlier_submission_does_not_count(head: ThisMachine) -> None:
    node1 = head.connect("node1")
    leave(head.home, "run-1", 60, "end.json", "first.json")
    leave(node1, "run-1", 30)
    leave(node1, "run-2", 20, "first.json")

    assert submit_again(head) == (("run-1", "run-2"), ())
    assert not Path(head.home, "spr-jobs/run-1/end.json").exists()
    # A job's limits count from its first start, also on a new head.
    firsts = [
        Path(head.home, "spr-jobs", each, "first.json").exists() for each in ("run-1", "run-2")
    ]
    assert firsts == [False, True]
    for job, age in (("run-1", "30"), ("run-2", "20")):
        assert Path(head.home, "spr-jobs", job, "launch.json").read_text() == age
