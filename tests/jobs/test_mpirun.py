"""The mpirun line and the script around it, as golden files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobs.mpirun import build_launch_command, render_run_script
from jobs.placement import Placement
from jobs.spec import JobPaths, JobSpec
from tests.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")
PATHS = JobPaths("squad-20260731-142501")
ARGV = ("--model=distilbert-base-uncased", "--output=/home/ubuntu/spr-jobs/it's here")


def make_job(backend: str, ppn: int) -> JobSpec:
    return JobSpec(PATHS.job_id, "squad", ARGV, nnodes=4, nproc_per_node=ppn, backend=backend)


def make_placement(ppn: int, threads: int, workers: int) -> Placement:
    tcmalloc = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"
    return Placement(ppn, threads, workers, interface="ens5", tcmalloc=tcmalloc)


@pytest.mark.parametrize(
    ("backend", "ppn", "threads", "workers"), [("gloo", 1, 32, 0), ("ccl", 2, 15, 1)]
)
def test_run_script(backend: str, ppn: int, threads: int, workers: int) -> None:
    placement = make_placement(ppn, threads, workers)
    command = build_launch_command(make_job(backend, ppn), placement, PATHS, "172.31.0.10")

    script = render_run_script(command, PATHS)

    check_golden(GOLDEN / f"run_{backend}.sh", script)
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)


def test_a_value_that_is_not_there_is_not_exported() -> None:
    placement = Placement(1, 2, 0, interface="ens5", tcmalloc=None)
    command = build_launch_command(make_job("gloo", 1), placement, PATHS, "172.31.0.10")

    assert "LD_PRELOAD" not in command.argv
    assert not any(name.startswith("CCL_") for name in command.argv)
