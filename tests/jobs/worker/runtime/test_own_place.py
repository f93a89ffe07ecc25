"""The cores that ranks take which torchrun has started: whole ones, never another rank's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import UsageError
from jobs.launchers.kubernetes.request import place_pod
from jobs.launchers.placement import NodeShape, Preload
from jobs.worker.runtime.cores import LocalCore, read_cores
from jobs.worker.runtime.pinning import format_cpus, share_out
from jobs.worker.spec import PlacementOptions

CPUS = sorted(os.sched_getaffinity(0))
_RANK = """
import json, os
from worker.runtime.pinning import take_place
import torch
plan, found = take_place(os.environ, torch.get_num_threads)
workers = os.environ.get("CCL_WORKER_AFFINITY")
threads = {*map(str, os.sched_getaffinity(0))}
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
for task in os.listdir("/proc/self/task"):
    threads |= {*map(str, os.sched_getaffinity(int(task)))}
local = os.environ.get("CCL_LOCAL_RANK"), os.environ.get("CCL_LOCAL_SIZE")
print(json.dumps([plan and plan.cpus, found.cpus, found.threads, workers, sorted(threads), local]))
"""


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
    assert len(taken) == len(set(taken)) == (needed if shares else 0)
    assert all((len(s.cpus), len(s.workers)) == (threads, workers) for s in shares)


def test_a_small_pod_that_sees_the_whole_node_stays_unpinned() -> None:
    assert share_out(machine(64), 1, 16, 0) == ()
    assert len(share_out(machine(64), 1, 33, 0)) == 1


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


def start(folder: Path, rank: int, size: int, **environ: str) -> subprocess.CompletedProcess[str]:
    """A rank as torchrun starts it: with its variables, and unpinned."""
    given = {"LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{size}", "OMP_PROC_BIND": "false"}
    return subprocess.run(
        [sys.executable, "-c", _RANK],
        cwd=folder,
        env={**os.environ, "RANK": f"{rank}", "WORLD_SIZE": f"{size}", **given, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def placed(folder: Path, rank: int, size: int, **environ: str) -> list[object]:
    done = start(folder, rank, size, **environ)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(len(read_cores(CPUS)) != 2, reason="written for a machine of two cores")
def test_ranks_pin_themselves_with_all_their_threads(nodes_folder: Path) -> None:
    first, second = (core.cpu for core in read_cores(CPUS))

    for rank, cpu in ((0, first), (1, second)):
        found = placed(nodes_folder, rank, 2, OMP_NUM_THREADS="1")
        assert found == [f"{cpu}", f"{cpu}", 1, None, [f"{cpu}"], [None, None]]
    # A core for oneCCL's worker, about which oneCCL is told all that mpirun would have said.
    ccl = {"OMP_NUM_THREADS": "1", "CCL_WORKER_COUNT": "1", "CCL_PROCESS_LAUNCHER": "none"}
    found = placed(nodes_folder, 0, 1, **ccl)
    assert found == [f"{second}", f"{second}", 1, f"{first}", [f"{second}"], ["0", "1"]]


def test_a_pod_with_fewer_cpus_than_threads_is_refused(nodes_folder: Path) -> None:
    threads = len(CPUS) + 1
    done = start(nodes_folder, 0, 1, OMP_NUM_THREADS=f"{threads}")
    assert f"{threads} threads planned, {len(CPUS)} found" in done.stderr


def test_mpiruns_variables_take_precedence(nodes_folder: Path) -> None:
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}
    found = placed(nodes_folder, 0, 2, OMP_NUM_THREADS="1", **hydra)
    assert found[:3] == [None, format_cpus(CPUS), 1]
