"""Placement of a rank on this machine: CPUs, threads, memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.worker.runtime.errors import PlacementError
from jobs.worker.runtime.pinning import (
    VARIABLE,
    RankPlacement,
    format_cpus,
    read_memory_policy,
    read_plan,
    render_plan,
)
from provision.on_node.proc import parse_cpus

# The rank's CPUs, threads and policy can't be given back, so a process of its own takes them.
_RANK = """
import json, os, sys
from dataclasses import asdict
from worker.runtime.errors import PlacementError
from worker.runtime.pinning import take_place
import torch
try:
    print(json.dumps(asdict(take_place(os.environ, torch.get_num_threads)[1])))
except PlacementError as error:
    sys.exit(f"{error.message}\\n{error.hint}")
"""
CPU = min(os.sched_getaffinity(0))
NODE = int(re.findall(r"\d+", Path("/sys/devices/system/node/online").read_text())[0])
PLAN = RankPlacement(cpus=str(CPU), threads=1, memory=f"prefer:{NODE}")


def run_rank(
    folder: Path, plan: RankPlacement | None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a rank that is pinned to one CPU, as by mpirun."""
    planned = {VARIABLE: render_plan([plan]), "MPI_LOCALRANKID": "0"} if plan else {}
    return subprocess.run(
        [sys.executable, "-c", _RANK],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **planned, **environ},
        preexec_fn=lambda: os.sched_setaffinity(0, {CPU}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_rank_reports_its_placement(nodes_folder: Path) -> None:
    done = run_rank(nodes_folder, PLAN)

    assert done.returncode == 0, done.stderr
    assert RankPlacement(**json.loads(done.stdout)) == PLAN


def test_without_a_plan_the_placement_is_reported_unchecked(nodes_folder: Path) -> None:
    done = run_rank(nodes_folder, None)

    assert done.returncode == 0, done.stderr
    assert RankPlacement(**json.loads(done.stdout)) == replace(PLAN, memory="default")


def test_every_difference_from_the_plan_is_named(nodes_folder: Path) -> None:
    done = run_rank(nodes_folder, replace(PLAN, cpus="900-901", threads=7))

    assert done.returncode == 1
    assert f"CPUs 900-901 planned, {CPU} found; 7 threads planned, 1 found" in done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_main_thread_bound_by_openmp_is_detected(nodes_folder: Path) -> None:
    all_cpus = os.sched_getaffinity(0)
    plan = RankPlacement(format_cpus(all_cpus), len(all_cpus), None)
    threads = {"OMP_NUM_THREADS": str(len(all_cpus))}
    widen = f"import os; os.sched_setaffinity(0, {set(all_cpus)})\n{_RANK}"
    for bind, code in (("false", 0), ("close", 1)):
        done = subprocess.run(
            [sys.executable, "-c", widen],
            cwd=nodes_folder,
            env={
                **os.environ,
                **threads,
                VARIABLE: render_plan([plan]),
                "MPI_LOCALRANKID": "0",
                "OMP_PROC_BIND": bind,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr


def test_each_local_rank_has_its_own_plan() -> None:
    environ = {VARIABLE: render_plan([PLAN, replace(PLAN, cpus="5")])}

    assert read_plan({}) is None
    assert read_plan({**environ, "MPI_LOCALRANKID": "1"}) == replace(PLAN, cpus="5")
    for rank in ({}, {"MPI_LOCALRANKID": "2"}):
        with pytest.raises(PlacementError, match="has no plan for local rank"):
            read_plan(environ | rank)


@settings(deadline=None)
@given(st.sets(st.integers(0, 400)))
def test_cpu_lists_have_the_kernels_format(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


def test_a_kernel_without_numa_has_no_memory_policy(tmp_path: Path) -> None:
    assert read_memory_policy(tmp_path / "none") is None
    assert read_memory_policy() == "default"
