"""The jobs of a lost head, on the worker that becomes the head."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.job_queue import submit_again
from tests.jobs.launch.this_machine import ThisMachine

_SCRIPT = """#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --nodes=1
#SBATCH --output=/dev/null
#SBATCH --{requeue}
sleep 60
"""


def leave(head: ThisMachine, job: str, age: int, *files: str, requeue: str = "requeue") -> None:
    """What a node has of a job that was submitted ``age`` seconds ago."""
    folder = Path(head.home, "spr-jobs", job)
    folder.mkdir(parents=True)
    script = folder / "run.sh"
    script.write_text(_SCRIPT.format(job=job, requeue=requeue))
    now = script.stat().st_mtime
    os.utime(script, (now - age, now - age))
    for name in files:
        (folder / name).write_text("{}")


def test_jobs_that_had_not_ended_start_again_oldest_first(head: ThisMachine) -> None:
    leave(head, "squad-new", 10)
    leave(head, "squad-old", 30)
    leave(head, "squad-ended", 40, "end.json")
    leave(head, "squad-cancelled", 50, "cancelled")
    leave(head, "run-once", 20, requeue="no-requeue")
    (Path(head.home, "spr-jobs") / "no-script").mkdir()

    assert submit_again(head) == (("squad-old", "squad-new"), ("run-once",))

    assert [name for name, _ in head.jobs_in_queue()] == ["squad-old", "squad-new"]
    # Interrupted and repeated, it submits nothing twice.
    assert submit_again(head)[0] == ("squad-old", "squad-new")
    assert len(head.jobs_in_queue()) == 2


def test_a_head_without_jobs_has_nothing_to_start(head: ThisMachine) -> None:
    assert submit_again(head) == ((), ())
