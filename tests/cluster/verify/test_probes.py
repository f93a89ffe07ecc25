"""The programs for the nodes, run for real: a local shell replaces SSH."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cluster.verify.network import NetworkReport, probe_network
from cluster.verify.reachability import check_lifetime, compare_clocks
from cluster.verify.results import NodeAnswer
from cluster.verify.verify import probe_directly, probe_nodes
from infra.errors import HostError
from provision.host import Result
from provision.on_node import network
from provision.on_node.facts import ask_tile_data
from provision.stacks.load import load_stack
from tests.fakes import FakeHost, run_here

STACK = load_stack("upstream")
# Each of these addresses is a name that resolves to this machine.
NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
_SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -o ]] && shift; shift; done
node=$1; shift
[[ -e {folder}/closed-$node ]] && {{ echo 'Permission denied (publickey).' >&2; exit 255; }}
cd {folder}
exec sh -c "$*"
"""


class LocalShell(FakeHost):
    """A head whose commands run here; its `ssh` runs commands here, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__("node0", [])
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin/ssh").write_text(_SSH.format(folder=folder))
        (folder / "bin/ssh").chmod(0o755)
        # The nodes use this Python.
        (folder / "bin/python3").symlink_to(sys.executable)

    def write_hosts(self, nodes: list[str]) -> None:
        (self.folder / "hosts").write_text("".join(f"{node}\n" for node in nodes))

    def close_node(self, node: str) -> None:
        (self.folder / f"closed-{node}").touch()

    def answer(self, command: str, timeout_s: float | None) -> Result:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return run_here(command, {"HOME": str(self.folder), "PATH": path}, timeout_s)


@pytest.fixture
def head(tmp_path: Path) -> LocalShell:
    folder = tmp_path / "home"
    folder.mkdir()
    return LocalShell(folder)


def probe(head: LocalShell, *nodes: str) -> dict[str, NodeAnswer]:
    head.write_hosts(list(nodes))
    return probe_nodes(head, STACK)


def test_each_node_reports_its_health(head: LocalShell) -> None:
    head.close_node("node2")
    # A user's file with the name of a module that the probe needs.
    (head.folder / "email.py").write_text("raise SystemExit(1)")
    answers = probe(head, "node0", "node1", "node2")

    assert list(answers) == ["node0", "node1", "node2"]
    zero, one, two = answers.values()
    assert (zero.reached, one.reached, two.reached) == (True, True, False)
    assert two.reason == "Permission denied (publickey)."
    assert one.value is not None
    assert {cpu.cpu for cpu in one.value.cpus} == os.sched_getaffinity(0)
    assert one.value.kernel == os.uname().release
    assert one.value.memory_total > 0
    assert not one.value.in_venv
    assert one.value.mark is None
    assert set(one.value.versions) == {
        *("torch", "transformers", "boto3", "datasets", "evaluate", "scikit-learn"),
        *("peft", "accelerate", "impi-rt", "tzdata"),
    }
    lead, error = compare_clocks(answers)["node1"]
    assert abs(lead) <= error + 0.01


@pytest.mark.parametrize(
    ("timer", "printed"), [("echo 1900000000", "1900000000"), ("echo 7; exit 3", "")]
)
def test_a_node_reports_when_its_timer_shuts_it_down(
    head: LocalShell, timer: str, printed: str
) -> None:
    """`sudo` replaces the timer."""
    (head.folder / "bin/sudo").write_text(f"#!/bin/sh\n{timer}\n")
    (head.folder / "bin/sudo").chmod(0o755)

    assert probe_directly(head, STACK).said[check_lifetime.command] == printed


def test_amx_flags_count_only_with_the_kernels_permission(head: LocalShell) -> None:
    lscpu = "Model name: Xeon\\nFlags: amx_tile amx_bf16 amx_int8\\n"
    shim = f'#!/bin/sh\n[ $# -gt 0 ] && exec /usr/bin/lscpu "$@"\nprintf "{lscpu}"\n'
    (head.folder / "bin/lscpu").write_text(shim)
    (head.folder / "bin/lscpu").chmod(0o755)

    answer = probe(head, "node0")["node0"]

    assert answer.value is not None
    assert (answer.value.model, answer.value.tile_data) == ("Xeon", ask_tile_data())
    refused = answer.value.tile_data != "granted"
    missing = (f"the kernel's permission ({answer.value.tile_data})",) if refused else ()
    assert answer.value.missing_amx == missing


def measure(head: LocalShell, nodes: list[str]) -> tuple[NetworkReport, list[str]]:
    notes: list[str] = []
    return probe_network(head, nodes, bandwidth=True, note=notes.append), notes


def test_the_nodes_measure_the_network_between_them(head: LocalShell) -> None:
    report, notes = measure(head, NODES)

    assert report.silent == {}
    assert len(report.links) == len(report.ssh) == 6
    for link in report.links:
        assert link.error is None
        assert link.address == link.target
        assert link.round_trip_s is not None
        assert link.clock_s is not None
        assert 0 < link.round_trip_s < 1
        assert abs(link.clock_s) < 0.1
    assert set(report.ssh.values()) == {None}
    assert all(isinstance(speed, float) and speed > 0 for speed in report.gbit.values())
    assert len(report.gbit) == 3
    assert len(notes) == 3


def test_round_trips_to_many_peers_are_measured_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, turn, replies = Counter[str](), threading.Lock(), list[dict[str, Any]]()
    alone: list[bool] = []

    def measure(peer: str) -> tuple[float, float]:
        seen[peer] += 1
        if seen[peer] > 1:  # the first one only waits for the peer
            alone.append(turn.acquire(blocking=False))
            time.sleep(0.001)
            turn.release()
        return 1e-5, 0.0

    monkeypatch.setattr(network, "connect", lambda peer, *_: nullcontext(peer["name"]))
    monkeypatch.setattr(network, "measure_round_trip", measure)
    monkeypatch.setattr(network, "reply", replies.append)
    peers = [{"name": f"127.0.0.{number}", "port": 1} for number in range(1, 9)]
    order = json.dumps({"stage": "reach", "peers": peers})
    monkeypatch.setattr("sys.stdin", io.StringIO(order))
    network.serve(b"token")

    assert [answer["round_trip"] for answer in replies[1].values()] == [1e-5] * 8
    assert alone
    assert all(alone)


def test_a_node_that_refuses_ssh_or_has_no_address_is_named(head: LocalShell) -> None:
    head.close_node(NODES[2])

    report, _ = measure(head, [NODES[0], "name.invalid", NODES[2]])

    assert report.silent == {NODES[2]: "Permission denied (publickey)."}
    pairs = {(link.source, link.target): link for link in report.links}
    assert pairs.keys() == {(NODES[0], "name.invalid"), ("name.invalid", NODES[0])}
    link = pairs[NODES[0], "name.invalid"]
    assert (link.address, link.error) == (None, "its name does not resolve")


def test_a_failure_on_the_head_is_raised_with_its_reason(head: LocalShell) -> None:
    (head.folder / "bin/python3").unlink()
    (head.folder / "bin/python3").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    (head.folder / "bin/python3").chmod(0o755)

    with pytest.raises(HostError, match="network between the nodes: broken"):
        measure(head, NODES)
