"""Real pinning: what the ranks find under Intel MPI's mpirun is what was planned for them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provision.facts import parse_topology
from provision.on_node.proc import parse_cpus
from tests.e2e.conftest import TWO, LiveCluster, podman, ssh_two

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
_PACKAGES = "/opt/spr-cluster/venv/lib/python3*/site-packages"
# In a .pth file there Python runs it at its start: the rank leaves all its CPUs but the first.
_FAULT = (
    "import os; 'SPR_PLACEMENT' in os.environ and "
    "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
)


def cores(cluster: LiveCluster) -> list[list[int]]:
    """The CPUs that each node may use, one of each core, asked of the node itself."""
    found = []
    for node in cluster.names:
        status = ssh_two(cluster, node, "grep Cpus_allowed_list /proc/self/status")
        allowed = parse_cpus(status.split(":")[1].strip())
        topology = parse_topology(ssh_two(cluster, node, "lscpu --parse=CPU,Core,Socket,Node"))
        firsts: dict[tuple[int, int], int] = {}
        for row in topology:
            if row.cpu in allowed:
                place = (row.socket, row.core)
                firsts[place] = min(row.cpu, firsts.get(place, row.cpu))
        found.append(sorted(firsts.values()))
    return found


def train(cluster: LiveCluster, folder: Path, *options: str, check: int = 0) -> Any:
    job = ["train", "squad", *TWO, "--demo", "--epochs", "1", "--results", str(folder)]
    done = cluster.cli.run(*job, *options, check=check)
    return done if check else json.loads((folder / "results.json").read_text())


def check_ranks(result: Any, expected: list[list[int]]) -> None:
    """``expected`` are the CPUs of each rank; the threads are as many."""
    for rank, cpus in zip(result["ranks"], expected, strict=True):
        found = rank["found"]
        assert sorted(parse_cpus(found["cpus"])) == cpus
        assert found["threads"] == rank["threads"] == rank["cpus"] == len(cpus)
        # Where the rank's cores lie in several NUMA nodes, nothing was asked for.
        assert found["memory"].startswith("prefer:" if rank["planned"]["memory"] else "default")
        assert {**found, "memory": rank["planned"]["memory"]} == rank["planned"]


def set_cpus(cluster: LiveCluster, cpus: dict[str, str]) -> None:
    """Let each node use these CPUs of this machine."""
    for node in cluster.names:
        podman("update", f"--cpuset-cpus={cpus[node]}", cluster.container(node))
        # Its jobs inherit the CPUs that it was started with.
        ssh_two(cluster, node, "sudo systemctl restart slurmd")


@pytest.fixture(scope="module")
def wide(two: LiveCluster) -> Iterator[LiveCluster]:
    """The two nodes with all CPUs of this machine: on a small one they have no more than one each."""
    allowed = "awk '/Cpus_allowed_list/ {print $2}' /proc/self/status"
    before = {node: ssh_two(two, node, allowed).strip() for node in two.names}
    all_cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    set_cpus(two, dict.fromkeys(two.names, all_cpus))
    yield two
    set_cpus(two, before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs")
def test_two_ranks_per_node_share_no_core(wide: LiveCluster, tmp_path: Path) -> None:
    cpus = cores(wide)
    assert min(map(len, cpus)) >= 2

    result = train(wide, tmp_path, "--ppn", "2")

    assert result["world_size"] == 4
    taken = [sorted(parse_cpus(rank["found"]["cpus"])) for rank in result["ranks"]]
    check_ranks(result, taken)
    for first, second, node in zip(taken[::2], taken[1::2], cpus, strict=True):
        assert len(first) == len(second) >= 1
        assert not set(first) & set(second)
        assert set(first + second) <= set(node)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a CPU to stay away from")
@pytest.mark.full
def test_a_rank_that_is_elsewhere_ends_the_run_before_it_trains(
    wide: LiveCluster, tmp_path: Path
) -> None:
    first = cores(wide)[1][0]
    host = ssh_two(wide, "node1", "hostname").strip()
    ssh_two(wide, "node1", f'for d in {_PACKAGES}; do echo "{_FAULT}" > $d/fault.pth; done')
    try:
        failed = train(wide, tmp_path, "--ppn", "1", check=1)
    finally:
        ssh_two(wide, "node1", f"rm {_PACKAGES}/fault.pth")

    result = failed.stderr.splitlines()
    (line,) = [line for line in result if line.startswith("spr-cluster: ")]
    assert f"rank 1 on {host}: this rank does not run where it was planned to" in line
    assert re.search(rf"CPUs \S+ planned, {first} found", line)
    assert not [line for line in result if "step " in line]
