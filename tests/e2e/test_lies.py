"""Nodes that lie: on real containers, one lie at a time, each found by `verify` with check and remedy.

The table of all defects is ``DEFECTS`` in test_nodes.py, with the tests of cluster/verify: there they are
the probe's answers; here the probe meets some of them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import LiveCluster, podman

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAME = "spr"
_PACKAGES = "/opt/spr-cluster/venv/lib/python3*/site-packages"
_TORCH = f"{_PACKAGES}/torch"
# Containers have the host's clock, and no namespace of Linux has another one: so it is the node's
# Python, with which jobs run and nodes are asked, that is two minutes ahead.
# (Python may read the line twice.)
_SKEW = (
    "import time; time.time.__name__ == 'time' and "
    "setattr(time, 'time', lambda true=time.time: true() + 120)"
)
_SKEW_CLOCK = f'for d in {_PACKAGES}; do echo "{_SKEW}" > $d/skew.pth; done'
_CLOCK = f"rm {_PACKAGES}/skew.pth"
_HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
# Where the processor has AMX the lie is that it has none, elsewhere that it has.
_LSCPU = f"""#!/bin/sh
[ $# -gt 0 ] && exec /usr/bin/lscpu "$@"
echo "Model name: Intel(R) Xeon(R) Gold 6455B"
echo "Flags: fpu avx512f {"" if _HAS_AMX else "amx_bf16 amx_tile amx_int8"}"
"""


def verify(cluster: LiveCluster, *options: str, code: int) -> list[dict[str, Any]]:
    done = cluster.cli.run("verify", "--name", NAME, "--json", *options, check=None)
    assert done.returncode == code, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    return found


def failures(checks: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(c["node"], c["check"]): c for c in checks if c["verdict"] == "fail"}


def caught(cluster: LiveCluster, node: str, check: str, *options: str) -> dict[str, Any]:
    """The one failure that there is: of this check, on this node, with something to do about it."""
    found = failures(verify(cluster, "--no-bandwidth", *options, code=1))
    assert list(found) == [(node, check)], found
    assert found[node, check]["wanted"]
    assert found[node, check]["remedy"]
    return found[node, check]


def follow_remedy(cluster: LiveCluster, remedy: str) -> None:
    """Do what `verify` says, in a shell, word for word."""
    command = remedy.replace("spr-cluster", shlex.join(cluster.cli.argv), 1)
    environment = cluster.cli.environment
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=300)


@contextmanager
def lie(cluster: LiveCluster, node: str, do: str, undo: str) -> Iterator[None]:
    """A node lies as long as this lasts."""
    cluster.cli.ssh(node, do)
    try:
        yield
    finally:
        cluster.cli.ssh(node, undo)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a CPU to take away")
def test_several_lies_are_found_each_and_a_good_cluster_has_what_was_judged(
    cluster: LiveCluster,
) -> None:
    shim = "/usr/local/bin/lscpu"
    processor = f"echo '{_LSCPU}' | sudo tee {shim} >/dev/null; sudo chmod 755 {shim}"
    files = f"{_PACKAGES}/torch-*.dist-info/METADATA {_PACKAGES}/torch/version.py"
    version = f"for f in {files}; do cp $f $f.true; sed -i 's/2\\.13\\.0/2.12.0/' $f; done"
    cluster.cli.ssh("node0", "sudo scontrol update nodename=node2 state=drain reason='a lie'")
    with (
        cores_taken(cluster, "node1"),
        lie(cluster, "node1", processor, f"sudo rm {shim}"),
        lie(cluster, "node1", version, f"for f in {files}; do mv $f.true $f; done"),
        lie(cluster, "node2", _SKEW_CLOCK, _CLOCK),
    ):
        checks = verify(cluster, "--no-bandwidth", code=1)

    found = failures(checks)
    lies = {("node1", "cores"), ("node1", "stack"), ("node2", "clock"), ("node2", "queue")}
    assert found.keys() == lies
    assert all(each["wanted"] and each["remedy"] for each in found.values())
    (amx,) = [c for c in checks if (c["node"], c["check"]) == ("node1", "amx")]
    assert (amx["verdict"], amx["found"][:6]) == ("warn", "no AMX")
    cores = found["node1", "cores"]
    assert cores["found"].startswith("1 core,")
    assert "as the other nodes" in cores["wanted"]
    stack = found["node1", "stack"]
    assert "torch 2.12.0" in stack["found"]
    assert stack["wanted"] == "torch==2.13.0"
    assert "pip install" in stack["remedy"]
    assert found["node2", "clock"]["found"].startswith(("120.0 s", "119.9 s"))
    assert "ahead of the other nodes" in found["node2", "clock"]["found"]
    assert "chrony" in found["node2", "clock"]["remedy"]
    assert found["node2", "queue"]["found"] == "drained: a lie"

    follow_remedy(cluster, found["node2", "queue"]["remedy"].splitlines()[-1])
    require_good(verify(cluster, code=0))


@contextmanager
def cores_taken(cluster: LiveCluster, victim: str) -> Iterator[None]:
    """Let the other nodes use all CPUs of this machine, and one node one of them."""
    cpus = sorted(os.sched_getaffinity(0))
    ask = "awk '/Cpus_allowed_list/ {print $2}' /proc/self/status"
    before = {node: cluster.cli.ssh(node, ask).strip() for node in cluster.names}

    def give(node: str, cpuset: str) -> None:
        podman("update", f"--cpuset-cpus={cpuset}", cluster.container(node))

    try:
        for node in cluster.names:
            give(node, ",".join(map(str, cpus[:1] if node == victim else cpus)))
        yield
    finally:
        for node, cpuset in before.items():
            give(node, cpuset)


def require_good(checks: list[dict[str, Any]]) -> None:
    """All was judged, and the processors are what they are."""
    expected = ("ok", "amx_bf16, amx_int8, amx_tile; tile") if _HAS_AMX else ("warn", "no AMX")
    amx = [(c["verdict"], c["found"][: len(expected[1])]) for c in checks if c["check"] == "amx"]
    assert amx == [expected] * 3
    assert {c["verdict"] for c in checks if c["check"] == "bandwidth"} <= {"ok", "warn"}
    judged = {c["check"] for c in checks if c["verdict"] == "ok"}
    assert judged >= {
        *("nodes", "ssh", "hostname", "mtu", "clock", "cores", "tcmalloc", "stack", "python"),
        *("disk", "names", "ports", "ssh pairs", "latency", "pairs", "mpirun", "queue"),
    }


@pytest.mark.skipif(not shutil.which("iptables"), reason="needs iptables")
@pytest.mark.full
def test_a_blocked_port(cluster: LiveCluster) -> None:
    rule = ["INPUT", "-p", "tcp", "--syn", "!", "--dport", "22", "-j", "DROP"]
    cluster.in_network("node2", "iptables", "-A", *rule)
    try:
        found = failures(verify(cluster, "--no-bandwidth", code=1))
    finally:
        cluster.in_network("node2", "iptables", "-D", *rule)
        cluster.wait_until_idle()

    assert ("node2", "ports") in found
    # The ports of mpirun and of Slurm's daemon may be behind that, too.
    assert set(found) <= {("node2", "ports"), ("node2", "queue"), ("cluster", "mpirun")}
    assert found["node2", "ports"]["found"] == "node0, node1 can't reach it: timed out"
    assert "security group" in found["node2", "ports"]["remedy"]


_KEYS = "~/.ssh/authorized_keys"
_PROXY = "/opt/spr-cluster/venv/bin/hydra_pmi_proxy"


@pytest.mark.full
@pytest.mark.parametrize(
    ("node", "do", "undo", "where", "told"),
    [
        ("node0", _SKEW_CLOCK, _CLOCK, ("node0", "clock"), "ahead of the other nodes"),
        (
            *("node2", f"cp {_KEYS} {_KEYS}.true; sed -i '/ spr-cluster-nodes$/d' {_KEYS}"),
            *(f"mv {_KEYS}.true {_KEYS}", ("node2", "ssh"), "Permission denied"),
        ),
        (
            *("node1", f"mv {_PROXY} {_PROXY}.away", f"mv {_PROXY}.away {_PROXY}"),
            *(("cluster", "mpirun"), "of 3 nodes answered"),
        ),
        (
            *("node1", f"mv {_TORCH}/_C.*.so /var/tmp/", f"mv /var/tmp/_C.*.so {_TORCH}/"),
            *(("node1", "mpirun"), "no torch: "),
        ),
    ],
)
def test_a_lie_is_the_one_failure(
    cluster: LiveCluster, node: str, do: str, undo: str, where: tuple[str, str], told: str
) -> None:
    with lie(cluster, node, do, undo):
        found = caught(cluster, *where)

    assert told in found["found"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "check", "told"),
    [
        ("sudo rm /usr/lib/*/libtcmalloc*", "tcmalloc", "missing"),
        # An address for documentation, to which nothing is routed: RFC 5737.
        (
            "sed -E '/ node2( |$)/s/^[0-9.]+/192.0.2.1/' /etc/hosts > /tmp/hosts.lie; "
            "sudo cp --no-preserve=all /tmp/hosts.lie /etc/hosts",
            *("names", "node2 is 192.0.2.1"),
        ),
    ],
)
def test_a_remedy_mends_a_node(cluster: LiveCluster, change: str, check: str, told: str) -> None:
    cluster.cli.ssh("node1", change)
    found = caught(cluster, "node1", check)

    follow_remedy(cluster, found["remedy"])

    assert found["found"] == told
    assert failures(verify(cluster, "--no-bandwidth", code=0)) == {}


@pytest.mark.full
def test_a_node_that_hangs(cluster: LiveCluster) -> None:
    name = cluster.container("node2")
    signal = ("systemctl", "kill", "--kill-who=main", "ssh", "--signal")
    podman("exec", name, *signal, "STOP")
    try:
        found = caught(cluster, "node2", "ssh")
    finally:
        podman("exec", name, *signal, "CONT")

    assert "timed out" in found["found"]
    assert "nor can this machine" in found["found"]
