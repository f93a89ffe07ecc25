"""Real pinning: what the ranks find under Intel MPI's mpirun is what was planned for them."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
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


@pytest.fixture(scope="module")
def shared(wide: LiveCluster) -> Iterator[LiveCluster]:
    """The nodes in a queue that knows all of their cores: it was configured before."""
    known = {
        node: [[0, cpu] for cpu in each] for node, each in zip(wide.names, cores(wide), strict=True)
    }
    count = len(known["node0"])
    shape = f"s/CPUs=[^R]*/CPUs={count} Sockets=1 CoresPerSocket={count} ThreadsPerCore=1 /"
    files = "/etc/slurm/slurm.conf /etc/slurm/spr-cluster-cores"
    change = f"sed -i '/^NodeName/{shape}' /etc/slurm/slurm.conf"
    write = f"echo '{json.dumps(known)}' > /etc/slurm/spr-cluster-cores"
    restart = "sudo systemctl restart slurmctld slurmd"
    for node in wide.names:
        ssh_two(wide, node, f"sudo tar -cf before.tar -P {files}")
        ssh_two(wide, node, f"sudo sh -c {shlex.quote(f'{change}; {write}')}; {restart}")
    yield wide
    for node in wide.names:
        ssh_two(wide, node, f"sudo tar -xf before.tar -P; rm -f before.tar; {restart}")


_PLACE = 'echo "on CPUs $(taskset -cp $$ | sed "s/.*: //") port $MASTER_PORT"'
_TAKE = '[ $RANK = 0 ] || exec python -c "x = [bytes(2**24 * [1]) for _ in range(200)]"'


def until(path: str) -> str:
    return f"until [ -e {path} ]; do sleep 0.2; done"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two jobs on a node need two cores")
def test_jobs_share_nodes_and_one_that_takes_too_much_memory_ends_alone(
    shared: LiveCluster, tmp_path: Path
) -> None:
    def submit(script: str, cores: int) -> str:
        part = ("--nodes=2", f"--cores={cores}", "--memory=1", "--ppn=1", "--folder=none")
        kept = f"--results={tmp_path / str(len(jobs))}"
        job = ("--detach", "--json", kept, *part, "--", "sh", "-c", script)
        jobs.append(str(json.loads(shared.cli.run("run", *TWO, *job).stdout)["job"]))
        return jobs[-1]

    def listed() -> list[Any]:
        found = {each["job"]: each for each in shared.cli.json("jobs", *TWO)["jobs"]}
        return [found[job] for job in jobs]

    jobs: list[str] = []
    others = len(cores(shared)[0]) - 1
    first = submit(f"{_PLACE}; {until('/tmp/enough')}; {_PLACE}", others)
    second = submit(f"{_PLACE}; {until('/tmp/take')}; {_TAKE}; sleep 300", 1)
    third = submit(_PLACE, 1)
    end = time.monotonic() + 60
    while [each["state"] for each in listed()] != ["running", "running", "queued"]:
        assert time.monotonic() < end, listed()
    for node in shared.names:
        ssh_two(shared, node, "touch /tmp/take")
    shared.cli.run("wait", *TWO, second, "--timeout", "60", check=1)
    shared.cli.run("wait", *TWO, third, "--timeout", "60")
    assert listed()[0]["state"] == "running"
    for node in shared.names:
        ssh_two(shared, node, "touch /tmp/enough")
    shared.cli.run("wait", *TWO, first, "--timeout", "60")

    failed = listed()[1]
    assert (failed["rank"], failed["host"], failed["cores"]) == (1, "node1", 1)
    assert failed["message"] == "it used more than its 1.0 GiB of memory; --memory gives it more"
    said = [shared.cli.run("logs", *TWO, job).stdout for job in jobs]
    places = [re.findall(r"on CPUs (\S+) port (\d+)", log) for log in said]
    assert [len(each) for each in places] == [4, 2, 2]
    taken = [[parse_cpus(cpus) for cpus, _ in each[:2]] for each in places[:2]]
    for node, mine, neighbors in zip(cores(shared), *taken, strict=True):
        assert (len(mine), len(neighbors)) == (others, 1)
        assert mine | neighbors == {*node}
    assert places[0][0][1] != places[1][0][1]
