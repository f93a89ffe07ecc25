"""/proc as text: CPU time by CPU, memory, traffic."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jobs.worker.pool.rank import child_environment
from provision.on_node.proc import (
    RankCpus,
    RankKey,
    busy_percent,
    find_ranks,
    group_cpus,
    parse_cpus,
    parse_memory,
    parse_network,
    parse_times,
)
from tests.jobs.top.samples import JOB

STAT = """\
cpu  500 0 100 1000 40 0 0 0 0 0
cpu0 400 0 100 100 20 10 5 5 300 0
cpu11 100 0 0 900 20 0 0 0 0 0
intr 12345 0 0
ctxt 99
"""
NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 9000     10    0    0    0     0          0         0     9000      10    0
  ens5:1000      10    0    0    0     0          0         0      200      10    0
docker0: 70      10    0    0    0     0          0         0       30      10    0
"""


def test_the_kernels_tables_are_read() -> None:
    assert parse_times(STAT) == {0: (520, 640), 11: (100, 1020)}, "guests count once"
    assert (parse_cpus("0-3,8\n"), parse_cpus("")) == ({0, 1, 2, 3, 8}, set())
    text = "MemTotal:       1000 kB\nMemFree:  5 kB\nMemAvailable:    400 kB\n"
    assert parse_memory(text) == {"memory": 1024000, "available": 409600}
    assert parse_memory("") == {"memory": 0, "available": 0}
    assert parse_network(NET, {"ens5"}) == (1000, 200)
    assert parse_network(NET, set()) == (1070, 230), "all but loopback"
    assert parse_network("", set()) == (0, 0)


BEFORE = {0: (100, 200), 1: (0, 0), 2: (5, 5)}
AFTER = {0: (150, 300), 1: (0, 100), 2: (105, 105)}


@pytest.mark.parametrize(
    ("before", "after", "cpus", "busy"),
    [
        *((BEFORE, AFTER, cpus, busy) for cpus, busy in (([0], 50), ([0, 1], 25), ([0, 1, 2], 50))),
        ({}, {0: (1, 2)}, [0], 0),  # a CPU that came online
        ({0: (1, 2)}, {}, [0], 0),
        ({0: (1, 2)}, {0: (1, 2)}, [0], 0),
        ({0: (9, 10)}, {0: (8, 11)}, [0], 0),  # iowait may decrease
    ],
)
def test_busy_is_the_share_of_the_time_of_the_chosen_cpus(
    before: dict[int, tuple[int, int]],
    after: dict[int, tuple[int, int]],
    cpus: list[int],
    busy: float,
) -> None:
    assert busy_percent(before, after, cpus) == busy


PLAN = json.dumps(
    [
        {"cpus": "1-3", "threads": 3, "memory": None, "workers": "0"},
        {"cpus": "5-7", "threads": 3, "memory": None, "workers": "4"},
    ]
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path / "proc"


def add_process(proc: Path, pid: int, cwd: str, allowed: str = "0-7", **environ: object) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    text = "\0".join(f"{name}={value}" for name, value in environ.items())
    (folder / "environ").write_text(text + "\0")
    (folder / "status").write_text(f"Name:\tpython\nCpus_allowed_list:\t{allowed}\n")
    (folder / "cwd").symlink_to(cwd)


def find(proc: Path, uid: int | None = None) -> dict[RankKey, RankCpus]:
    return find_ranks(str(proc), "/home/ubuntu/spr-jobs", os.getuid() if uid is None else uid)


def test_a_rank_has_the_cpus_of_its_plan_or_those_that_the_kernel_allows(proc: Path) -> None:
    folder = f"/home/ubuntu/spr-jobs/{JOB}"
    # OpenMP may have bound the main thread to one CPU. A child has the environment of its rank.
    add_process(proc, 10, folder, "1", PMI_RANK=2, MPI_LOCALRANKID=0, SPR_PLACEMENT=PLAN)
    for pid in (11, 12):
        add_process(proc, pid, folder, "5", PMI_RANK=3, MPI_LOCALRANKID=1, SPR_PLACEMENT=PLAN)
    add_process(proc, 13, folder, SLURM_JOB_NAME=JOB)  # mpirun
    add_process(proc, 14, f"{folder}/output", "0-5", PMI_RANK=0)
    unpinned = json.dumps([{"cpus": None, "threads": 24, "memory": None}])
    other = "/home/ubuntu/spr-jobs/b"
    add_process(proc, 15, other, PMI_RANK=1, SPR_PLACEMENT=unpinned, MPI_LOCALRANKID=0)
    # A program in another folder has the job that Slurm names.
    add_process(proc, 16, "/home/ubuntu", PMI_RANK=0, SLURM_JOB_NAME="a/b")

    planned = {(JOB, 2): ("1-3", "0"), (JOB, 3): ("5-7", "4")}
    allowed = {(JOB, 0): ("0-5", ""), ("b", 1): ("0-7", ""), ("a_b", 0): ("0-7", "")}
    assert find(proc) == {**planned, **allowed}


def test_torchruns_ranks_are_found_and_torchrun_itself_is_none(proc: Path) -> None:
    folder = f"/home/ubuntu/spr-jobs/{JOB}"
    add_process(proc, 10, folder, WORLD_SIZE=4)  # torchrun
    add_process(proc, 11, folder, "1", RANK=2, LOCAL_RANK=0, SPR_PLACEMENT=PLAN)
    for pid in (12, 13):  # and a data loader
        add_process(proc, pid, folder, "4-5", RANK=3, LOCAL_RANK=1)
    add_process(proc, 14, folder, RANK=7)  # of something else
    add_process(proc, 15, folder, "6", PMI_RANK=5, RANK=9, LOCAL_RANK=0)  # mpirun decides

    assert find(proc) == {(JOB, 2): ("1-3", "0"), (JOB, 3): ("4-5", ""), (JOB, 5): ("6", "")}


def test_other_processes_are_no_ranks(proc: Path) -> None:
    add_process(proc, 10, "/home/ubuntu", PMI_RANK=0)  # somebody's own mpirun
    add_process(proc, 11, f"/home/ubuntu/spr-jobs/{JOB}", PMI_RANK="x")
    (proc / "12").mkdir()  # has ended
    part = child_environment({"PMI_RANK": "1", "PMI_SIZE": "2"})  # a trial or element
    add_process(proc, 14, f"/home/ubuntu/spr-jobs/{JOB}", **part)

    assert find(proc) == {}
    add_process(proc, 13, f"/home/ubuntu/spr-jobs/{JOB}", PMI_RANK=0)
    assert find(proc, uid=os.getuid() + 1) == {}
    assert list(find(proc)) == [(JOB, 0)]


def test_cpus_are_grouped_by_rank_then_oneccl_then_the_rest() -> None:
    ranks = {RankKey(JOB, 1): RankCpus("5-7", "4"), RankKey(JOB, 0): RankCpus("1-3", "0")}

    groups = group_cpus(ranks, set(range(10)))

    assert [(g.name, g.ranks, sorted(g.cpus), g.listed) for g in groups] == [
        ("rank 0", [0], [1, 2, 3], "1-3"),
        ("rank 1", [1], [5, 6, 7], "5-7"),
        ("oneCCL", [], [0, 4], "0,4"),
        ("rest", [], [8, 9], ""),
    ]


def test_a_group_has_the_ranks_of_one_job_that_share_their_cpus() -> None:
    ranks = {RankKey(JOB, rank): RankCpus("0-1") for rank in (0, 1)}
    assert [(g.name, g.ranks) for g in group_cpus(ranks, {0, 1})] == [("rank 0,1", [0, 1])]
    assert [g.name for g in group_cpus({}, {0, 1})] == ["rest"]
    ranks = {RankKey(JOB, 0): RankCpus("0"), RankKey("run-1", 0): RankCpus("1")}
    found = [(g.name, g.job, g.cpus) for g in group_cpus(ranks, {0, 1})]
    assert found == [("rank 0", "run-1", {1}), ("rank 0", JOB, {0})]
