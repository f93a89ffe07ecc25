"""Placement of a rank on this machine: as mpirun planned it, or as it takes it under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import UsageError
from jobs.places.kubernetes.request import place_pod
from jobs.places.placement import NodeShape, Preload
from jobs.worker.runtime.cores import LocalCore, read_cores
from jobs.worker.runtime.pinning import (
    LEAST_SHARE,
    VARIABLE,
    RankPlacement,
    format_cpus,
    read_memory_policy,
    render_plan,
    share_out,
)
from jobs.worker.spec import PlacementOptions
from provision.on_node.proc import parse_cpus
from tests.harness.forked import Forked

# The rank's CPUs, threads and policy can't be given back, so it is a separate process.
_RANK = """
import json, os, sys
from dataclasses import asdict
from worker.runtime.errors import WorkerError
from worker.runtime.pinning import take_place
if {mask}:
    os.sched_setaffinity(0, {mask})
try:
    plan, found = take_place(os.environ, {count})
except WorkerError as error:
    sys.exit(error.message)
names = ("CCL_WORKER_AFFINITY", "CCL_LOCAL_RANK", "CCL_LOCAL_SIZE")
print(json.dumps([plan and asdict(plan), asdict(found), [os.environ.get(name) for name in names]]))
"""
_ASKED = 'lambda: int(os.environ["OMP_NUM_THREADS"])'
CPUS = sorted(os.sched_getaffinity(0))
CPU, EVERY = CPUS[0], format_cpus(CPUS)
NODE = int(re.findall(r"\d+", Path("/sys/devices/system/node/online").read_text())[0])
PLAN = RankPlacement(cpus=str(CPU), threads=1, memory=f"prefer:{NODE}")
MPIRUN = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}


def torchrun(rank: int, size: int, threads: int = 1) -> dict[str, str]:
    """The variables of a rank that torchrun has started, unpinned."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in {**found, "OMP_NUM_THREADS": threads}.items()}


def place(folder: Path, environ: dict[str, str], mask: set[int] | None = None) -> tuple[int, str]:
    """Run a rank; return its exit code and what it found, or what is wrong."""
    code = _RANK.format(mask=mask or (), count=_ASKED)
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return Forked(["-c", code], folder, given).finish(120)


def planned(plan: RankPlacement) -> dict[str, str]:
    return {**MPIRUN, VARIABLE: render_plan([plan])}


@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_rank_reports_its_placement(nodes_folder: Path, plan: RankPlacement | None) -> None:
    code, said = place(nodes_folder, planned(plan) if plan else MPIRUN, {CPU})
    assert code == 0, said
    unplanned = asdict(replace(PLAN, memory="default"))
    assert json.loads(said)[:2] == ([asdict(plan)] * 2 if plan else [None, unplanned])


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_a_main_thread_bound_by_openmp_is_detected(nodes_folder: Path) -> None:
    count = len(CPUS)
    environ = planned(RankPlacement(EVERY, count, None))
    environ |= {"OMP_NUM_THREADS": str(count), "OMP_PROC_BIND": "close"}
    code = _RANK.format(mask=set(CPUS), count='__import__("torch").get_num_threads')
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=nodes_folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"CPUs {EVERY} planned, {CPU} found\n" in done.stderr


@pytest.mark.skipif(len(read_cores(CPUS)) != 2, reason="written for a machine of two cores")
def test_ranks_of_torchrun_pin_themselves(nodes_folder: Path) -> None:
    first, second = (core.cpu for core in read_cores(CPUS))

    def found(environ: dict[str, str]) -> list[Any]:
        code, said = place(nodes_folder, environ)
        assert code == 0, said
        plan, found, ccl = json.loads(said)
        return [plan and plan["cpus"], found["cpus"], found["threads"], ccl]

    for rank, cpu in enumerate((first, second)):
        assert found(torchrun(rank, 2)) == [f"{cpu}", f"{cpu}", 1, [None] * 3]
    # A core for oneCCL's worker; the variables tell oneCCL what mpirun would have told it.
    ccl = {**torchrun(0, 1), "CCL_WORKER_COUNT": "1", "CCL_PROCESS_LAUNCHER": "none"}
    assert found(ccl) == [f"{second}", f"{second}", 1, [f"{first}", "0", "1"]]
    assert found({**torchrun(0, 2), **MPIRUN}) == [None, EVERY, 1, [None] * 3], "mpirun has pinned"


_SENDER = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from worker.runtime import pinning, ranks
pinning._CPUS = Path(sys.argv[1])
os.sched_setaffinity(0, {int(sys.argv[2])})
before = set(os.listdir("/proc/self/task"))
with ranks.join("gloo", {}):
    for task in sorted({*os.listdir("/proc/self/task")} - before) + [str(os.getpid())]:
        print(*os.sched_getaffinity(int(task)))
"""


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("siblings", [CPUS[:2], CPUS[:1]])
def test_what_sends_runs_on_hardware_threads_that_do_not_compute(
    nodes_folder: Path, tmp_path: Path, siblings: list[int]
) -> None:
    topology = tmp_path / f"cpu{CPU}" / "topology"
    topology.mkdir(parents=True)
    mask = f"{sum(1 << cpu for cpu in siblings):016x}"
    (topology / "thread_siblings").write_text(f"{mask[:8]},{mask[8:]}\n")
    code, text = Forked(["-c", _SENDER, str(tmp_path), str(CPU)], nodes_folder).finish(120)
    assert code == 0, text
    *senders, main = text.split()
    assert main == str(CPU)
    assert {*senders} == {str(siblings[-1])}


@given(st.sets(st.integers(0, 400)))
def test_cpu_lists_have_the_kernels_format(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


def test_a_kernel_without_numa_has_no_memory_policy(tmp_path: Path) -> None:
    assert read_memory_policy(tmp_path / "none") is None
    assert read_memory_policy() == "default"


def machine(cores: int, numa: int = 1) -> list[LocalCore]:
    return [LocalCore(core, core * numa // cores, core * numa // cores) for core in range(cores)]


@given(
    numa=st.integers(1, 4),
    each=st.integers(2, 24),
    ppn=st.none() | st.integers(1, 6),
    workers=st.integers(0, 2),
)
def test_a_pod_on_its_node_finds_what_was_planned(
    numa: int, each: int, ppn: int | None, workers: int
) -> None:
    """Kubelet may give the pod any cores of the node; here, the same number of each NUMA node."""
    shape = NodeShape(cores=numa * each, numa=numa)
    options = PlacementOptions("auto", ppn, workers or None)
    try:
        placed, size = place_pod(shape, options, "ccl" if workers else "gloo", Preload("", None))
    except UsageError:
        return
    threads = placed.omp_threads
    found = machine(size.cpus // shape.threads_per_core, numa)

    shares = share_out(found, placed.nproc_per_node, threads, workers)

    assert shares == placed.shares[0] or numa > 1
    assert len(shares) == placed.nproc_per_node
    taken = [cpu for share in shares for cpu in (*share.cpus, *share.workers)]
    assert len(taken) == len(set(taken)) == len(found)
    assert {len(share.cpus) for share in shares} == {threads}


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    ranks=st.integers(1, 5),
    threads=st.integers(1, 8),
    workers=st.integers(0, 2),
)
def test_no_two_ranks_share_a_core(
    sizes: list[int], ranks: int, threads: int, workers: int
) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    cores = [LocalCore(cpu, 0, node) for cpu, node in enumerate(nodes)]

    shares = share_out(cores, ranks, threads, workers)

    needed = ranks * (threads + workers)
    assert bool(shares) == (len(cores) // 2 < needed <= len(cores))
    taken = [cpu for share in shares for cpu in (*share.cpus, *share.workers)]
    assert len(taken) == len(set(taken))
    assert all(len(share.workers) == workers for share in shares)
    widths = {len(share.cpus) for share in shares}
    assert widths <= {threads} or len(widths) == 1
    assert all(LEAST_SHARE * threads <= width <= threads for width in widths)
    if not widths <= {threads}:
        assert all(s.numa is not None for s in shares) or ranks < len(sizes)


@pytest.mark.parametrize(
    ("sizes", "ranks", "threads", "width", "numa"),
    [
        # One core of each socket is reserved, and kubelet fills the first one.
        ((30, 32), 2, 31, 30, [0, 1]),
        ((32, 28), 4, 15, 14, [0, 0, 1, 1]),
        ((40, 30), 2, 30, 30, [0, 1]),
        ((15, 16, 16, 15), 2, 31, 31, [None, None]),
        # Too few on one of them, and no way to divide.
        ((32, 8), 2, 20, 20, [0, None]),
        ((32, 30), 3, 20, 20, [0, None, 1]),
    ],
)
def test_ranks_stay_on_their_numa_nodes_where_kubelet_gives_uneven_ones(
    sizes: tuple[int, ...], ranks: int, threads: int, width: int, numa: list[int | None]
) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    cores = [LocalCore(cpu, node, node) for cpu, node in enumerate(nodes)]
    shares = share_out(cores, ranks, threads, 0)
    assert [share.numa for share in shares] == numa
    assert {len(share.cpus) for share in shares} == {width}


_UNEVEN = """
import os, sys
import torch
from worker.runtime import pinning
from worker.runtime.cores import LocalCore
pinning._find_cores = lambda: [LocalCore(cpu, cpu // 33, cpu // 33) for cpu in range(1, 63)]
os.sched_setaffinity = lambda _, cpus: setattr(os, "sched_getaffinity", lambda _: set(cpus))
plan, found = pinning.take_place(os.environ, torch.get_num_threads, torch.set_num_threads)
print(plan.threads, found.threads, found.cpus, os.environ["OMP_NUM_THREADS"])
"""


def test_a_rank_on_a_smaller_numa_node_lowers_its_threads(nodes_folder: Path) -> None:
    for rank, cpus in enumerate(("1-30", "33-62")):
        given = {**os.environ, **torchrun(rank, 2, threads=31)}
        code, said = Forked(["-c", _UNEVEN], nodes_folder, given).finish(120)
        assert code == 0, said
        assert f"30 30 {cpus} 30\n" in said
        assert ("30 threads per rank instead of 31" in said) is (rank == 0)


def test_cores_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    for cpu, (socket, core, node) in enumerate([(0, 0, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1)]):
        folder = tmp_path / "cpu" / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology" / "physical_package_id").write_text(f"{socket}\n")
        (folder / "topology" / "core_id").write_text(f"{core}\n")

    wanted = [LocalCore(1, 0, 0), LocalCore(2, 0, 0), LocalCore(3, 1, 1)]
    assert read_cores([3, 1, 2], tmp_path) == wanted
    assert len(read_cores(CPUS)) <= len(CPUS)
