"""The programs for the nodes, run for real: a local shell replaces SSH."""

from __future__ import annotations

import ast
import os
import sys
import time
from pathlib import Path

import pytest

import cluster.verify.network_agent
import provision.probe
from cluster.verify.network_probe import NetworkReport, probe_network
from cluster.verify.node_probe import NodeAnswer, probe_directly, probe_nodes
from infra.errors import HostError
from provision.host import Result
from provision.stacks.load import load_stack
from tests.fakes import FakeHost, run_here

STACK = load_stack("upstream")
# Each of these addresses is a name that resolves to this machine.
NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
_SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -o ]] && shift; shift; done
node=$1; shift
[[ -e {folder}/closed-$node ]] && {{ echo 'Permission denied (publickey).' >&2; exit 255; }}
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


def probe(head: LocalShell, *nodes: str) -> tuple[NodeAnswer, ...]:
    head.write_hosts(list(nodes))
    return probe_nodes(head, STACK)


def probe_folders() -> set[Path]:
    return set(Path("/dev/shm").glob("spr-verify.*"))


def test_each_node_reports_its_health(head: LocalShell) -> None:
    head.close_node("node2")
    answers = probe(head, "node0", "node1", "node2")

    zero, one, two = answers
    assert (zero.reached, one.reached, two.reached) == (True, True, False)
    assert two.reason == "Permission denied (publickey)."
    assert one.health is not None
    assert {cpu.cpu for cpu in one.health.cpus} == os.sched_getaffinity(0)
    assert one.health.kernel == os.uname().release
    assert one.health.memory_total > 0
    assert not one.health.in_venv
    assert one.health.mark is None
    assert set(one.health.versions) == {
        "torch",
        "transformers",
        "datasets",
        "scikit-learn",
        "impi-rt",
    }
    assert abs(one.clock_s) <= one.clock_error_s + 0.01
    # A probe of another test may be at work beside this one; its folder goes, too.
    left, deadline = probe_folders(), time.monotonic() + 20
    while left := left & probe_folders():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("timer", "expires"),
    [("echo 1900000000", 1_900_000_000), ("exit 3", None), ("echo soon", None)],
)
def test_a_node_reports_when_its_timer_shuts_it_down(
    head: LocalShell, timer: str, expires: int | None
) -> None:
    """`sudo` replaces the timer."""
    (head.folder / "bin/sudo").write_text(f"#!/bin/sh\n{timer}\n")
    (head.folder / "bin/sudo").chmod(0o755)

    assert probe_directly(head, STACK).expires == expires


def test_amx_requires_the_flags_and_the_kernels_permission(head: LocalShell) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    health = probe_directly(head, STACK)

    assert health.tile_data == "granted" or health.tile_data.startswith("E")
    has_amx = {"amx_tile", "amx_bf16", "amx_int8"} <= flags
    assert bool(health.missing_amx) != (has_amx and health.tile_data == "granted")


def test_amx_flags_count_only_with_the_kernels_permission(head: LocalShell) -> None:
    lscpu = "Model name: Xeon\\nFlags: amx_tile amx_bf16 amx_int8\\n"
    shim = f'#!/bin/sh\n[ $# -gt 0 ] && exec /usr/bin/lscpu "$@"\nprintf "{lscpu}"\n'
    (head.folder / "bin/lscpu").write_text(shim)
    (head.folder / "bin/lscpu").chmod(0o755)

    (answer,) = probe(head, "node0")

    assert answer.health is not None
    assert answer.health.model == "Xeon"
    refused = answer.health.tile_data != "granted"
    missing = (f"the kernel's permission ({answer.health.tile_data})",) if refused else ()
    assert answer.health.missing_amx == missing


def measure(head: LocalShell, nodes: list[str]) -> tuple[NetworkReport, list[str]]:
    notes: list[str] = []
    return probe_network(head, nodes, bandwidth=True, note=notes.append), notes


def test_the_nodes_measure_the_network_between_them(
    head: LocalShell, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_node_that_refuses_ssh_is_left_out_and_named(head: LocalShell) -> None:
    head.close_node(NODES[2])

    report, _ = measure(head, NODES)

    assert report.silent == {NODES[2]: "Permission denied (publickey)."}
    assert {(link.source, link.target) for link in report.links} == {
        (NODES[0], NODES[1]),
        (NODES[1], NODES[0]),
    }


def test_a_name_that_does_not_resolve_is_reported(head: LocalShell) -> None:
    report, _ = measure(head, ["127.0.0.1", "name.invalid"])

    (link,) = [link for link in report.links if link.target == "name.invalid"]
    assert (link.address, link.error) == (None, "its name does not resolve")


def test_a_failure_on_the_head_is_raised_with_its_reason(head: LocalShell) -> None:
    (head.folder / "bin/python3").unlink()
    (head.folder / "bin/python3").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    (head.folder / "bin/python3").chmod(0o755)

    with pytest.raises(HostError, match="network between the nodes: broken"):
        measure(head, NODES)


@pytest.mark.parametrize("module", [provision.probe, cluster.verify.network_agent])
def test_programs_for_the_nodes_import_only_the_standard_library(module: object) -> None:
    source = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    # Stack `reference` has Python 3.8 on its nodes.
    tree = ast.parse(source, feature_version=(3, 8))

    names = [n for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    roots = {alias.name.split(".")[0] for alias in names} | {str(f.module) for f in froms}
    assert {root.split(".")[0] for root in roots} <= sys.stdlib_module_names
