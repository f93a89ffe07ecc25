"""Each defect of a node is found by its own check and by no other."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.verify import machine
from cluster.verify.reachability import check_lifetime
from cluster.verify.results import CommandCheck, NodeAnswer, Verdict
from cluster.verify.verify import NODE_CHECKS, check_nodes, summarize_problems
from tests.cluster.verify.fleet import (
    IN_CONTAINERS,
    NODES,
    ON_AWS,
    STACK,
    answers,
    judge,
    one,
    verdicts_of,
)
from tests.provision.machine import Machine

_TOPOLOGY = "".join(f"{cpu},{cpu % 16},0,0\n" for cpu in range(32))
_NO_SMT = "".join(f"{cpu},{cpu},0,0\n" for cpu in range(32))
_GIB = 1 << 30


def said(printed: str, *checks: CommandCheck) -> dict[str, Any]:
    """A part of a node's answer: what the commands of checks print."""
    return {"said": {check.command: printed for check in checks}}


# Change of node1's answer, the check that finds it, its verdict, and part of its finding.
DEFECTS: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"amx": []}, "amx", "fail", "no AMX: Xeon lacks amx_bf16, amx_int8, amx_tile"),
    ({"amx": ["amx_tile", "amx_int8"]}, "amx", "fail", "lacks amx_bf16"),
    ({"tile_data": "EINVAL"}, "amx", "fail", "the kernel's permission (EINVAL)"),
    ({"topology": _TOPOLOGY, "allowed": "0-31"}, "cores", "fail", "16 cores"),
    ({"topology": _NO_SMT, "allowed": "0-31"}, "cores", "warn", "32 CPUs"),
    ({"allowed": "0-15"}, "cores", "fail", "16 CPUs"),
    ({"kernel": "6.8.1"}, "kernel", "warn", "6.8.1"),
    ({"memory_total": 400 << 20}, "memory", "fail", "400 GiB"),
    ({"memory_available": 50 << 20}, "memory", "warn", "50 available"),
    (said("performance\npowersave", machine.check_governor), "governor", "warn", "powersave"),
    (said("1", machine.check_turbo), "turbo", "warn", "off"),
    (said("always madvise [never]", machine.check_huge_pages), "huge pages", "warn", "never"),
    (said("hpet", machine.check_clocksource), "clocksource", "warn", "hpet"),
    ({"clock_kept": False}, "time service", "warn", "not synchronized"),
    ({"tcmalloc": None}, "tcmalloc", "fail", "missing"),
    ({"tcmalloc_error": "wrong ELF class"}, "tcmalloc", "fail", "wrong ELF class"),
    ({"tcmalloc": "/usr/lib/x/libtcmalloc.so.5"}, "tcmalloc", "fail", "so.5"),
    ({"in_venv": False}, "stack", "fail", "no working Python"),
    ({"mark": None}, "stack", "fail", "incomplete installation"),
    ({"mark": "0123"}, "stack", "fail", "installation 0123"),
    ({"versions": {"torch": "2.6.0+cpu"}}, "stack", "fail", "torch 2.6.0+cpu"),
    ({"versions": {"numpy": "2.4.1"}}, "stack", "fail", "numpy 2.4.1"),
    ({"versions": {"impi-rt": None}}, "stack", "fail", "no impi-rt"),
    ({"modules": {"torch": "2.8.0"}}, "stack", "fail", "module torch 2.8.0"),
    ({"python": "3.10.9"}, "python", "warn", "3.10.9"),
    ({"disk_free": _GIB}, "disk", "fail", "1 of 100 GiB free"),
    ({"disk_free": 5 * _GIB}, "disk", "warn", "5 of 100 GiB free"),
    ({"disk_size": 20 * _GIB, "disk_free": 15 * _GIB}, "disk", "warn", "15 of 20"),
    ({"disk_error": "Read-only file system"}, "disk", "fail", "Read-only"),
    ({"own_addresses": ["127.0.1.1"]}, "hostname", "fail", "127.0.1.1"),
    ({"own_addresses": []}, "hostname", "fail", "no address"),
    ({"mtus": {"172.31.0.11": 1500}}, "mtu", "fail", "ens5: 1500"),
    (said("", check_lifetime), "time to live", "fail", "the timer that shuts it down does not run"),
    (
        said("1900003600 1900003600 0", check_lifetime),
        "time to live",
        "fail",
        "2030-03-17 18:46:40 UTC",
    ),
    ({"mtus": {}}, "mtu", "fail", "no interface has 172.31.0.11"),
)


@pytest.mark.parametrize(
    ("change", "check", "verdict", "found"), DEFECTS, ids=[str(row[0]) for row in DEFECTS]
)
def test_a_defect_is_found_by_its_check_with_a_remedy(
    change: dict[str, Any], check: str, verdict: str, found: str
) -> None:
    results = judge(node1=change)

    assert verdicts_of(results) == [("node1", check, verdict)]
    result = one(results, "node1", check)
    assert found in result.found
    assert result.wanted
    assert result.remedy


def test_the_remedies_for_a_dead_timer_and_a_wrong_version() -> None:
    results = judge(node1=said("", check_lifetime), node2={"versions": {"torch": "2.6.0"}})
    timer, stack = one(results, "node1", "time to live"), one(results, "node2", "stack")
    assert timer.wanted == "shuts down at 2030-03-17 17:46:40 UTC"
    assert "spr-cluster extend 1m --name bert" in timer.remedy.splitlines()
    pip = "spr-cluster ssh --name bert node2 -- '/opt/spr-cluster/venv/bin/pip "
    assert stack.remedy.startswith(pip)
    assert all(text in stack.remedy for text in ("torch==2.7.0", *STACK.indexes))
    # A cluster without a time in its tags needs a timer all the same.
    unknown = replace(ON_AWS, lifetimes={})
    assert verdicts_of(judge(unknown)) == []
    results = judge(unknown, node2=said("", check_lifetime))
    assert verdicts_of(results) == [("node2", "time to live", "fail")]


def test_healthy_machines_pass_all_checks() -> None:
    assert ON_AWS.machine is not None
    unknown = replace(ON_AWS, machine=replace(ON_AWS.machine, sockets=None))
    for expected in (ON_AWS, unknown):  # EC2 may not tell the sockets
        results = judge(expected)
        assert verdicts_of(results, "warn", "fail", "skipped") == []
        assert len(results) == len(NODES) * len({r.check for r in results})
        assert len(results) == len(NODES) * (1 + len(NODE_CHECKS))
    fewer = judge(unknown, node1={"topology": _TOPOLOGY, "allowed": "0-31"})
    assert ("node1", "cores", "fail") in verdicts_of(fewer)


def test_values_that_a_machine_does_not_expose_are_skipped() -> None:
    settings = (
        *(machine.check_governor, machine.check_turbo, machine.check_huge_pages),
        machine.check_clocksource,
    )
    results = judge(node1={**said("", *settings), "clock_kept": None})

    assert verdicts_of(results) == []
    assert [check for _, check, _ in verdicts_of(results, "skipped")] == [
        *("governor", "turbo", "huge pages", "clocksource", "time service"),
    ]


def test_what_the_kernel_does_not_limit_is_named() -> None:
    results = judge(node1=said("pids\nmemory", machine.check_limits))

    (found,) = (each.found for each in results if each.verdict is Verdict.SKIPPED)
    assert found.startswith("the kernel can't limit cpuset for jobs that share the node: ")
    results = judge(IN_CONTAINERS, node1=said("", machine.check_limits))
    assert "the kernel can't limit memory, pids, cpuset for" in " ".join(r.found for r in results)


def test_containers_are_compared_and_their_host_is_not_checked() -> None:
    one_core = {"topology": "0,0,0,0\n1,1,0,0", "allowed": "0", "amx": [], "tile_data": "ENOTSUP"}
    host = {**said("powersave", machine.check_governor), "clock_kept": False}
    small = {**one_core, **host, "memory_total": 8 << 20}

    results = judge(IN_CONTAINERS, **dict.fromkeys(NODES, small))

    assert verdicts_of(results) == [(node, "amx", "warn") for node in NODES]
    assert one(results, "node1", "amx").found.startswith("no AMX")
    assert one(results, "node1", "cores").found == "1 core, 1 socket, 1 NUMA node, 1 CPU"
    assert one(results, "node1", "governor").found == "not checked in a container: powersave"
    assert one(results, "node1", "memory").verdict.value == "skipped"


def test_a_container_with_fewer_cores_than_the_others_fails() -> None:
    wide = {"topology": "0,0,0,0\n1,1,0,0", "allowed": "0-1"}
    cut = {**wide, "allowed": "1"}

    results = judge(IN_CONTAINERS, node0=wide, node1=cut, node2=wide)

    assert verdicts_of(results) == [("node1", "cores", "fail")]
    assert "as the other nodes: 2 cores" in one(results, "node1", "cores").wanted


def test_without_amx_the_check_never_reports_ok() -> None:
    changes: tuple[dict[str, Any], ...] = ({"amx": []}, {"tile_data": "ENOTSUP"})
    for change in changes:
        results = judge(replace(ON_AWS, amx_required=False), node2=change)
        assert one(results, "node2", "amx").verdict.value == "warn"
        assert "no AMX" in one(results, "node2", "amx").found
    old = {"amx": [], "kernel": "5.15.0-1084-aws"}  # as on Ubuntu 20.04, where it does support AMX
    results = judge(replace(ON_AWS, amx_required=False), **dict.fromkeys(NODES, old))
    assert {check for _, check, _ in verdicts_of(results)} == {"amx"}


@pytest.mark.parametrize("file", ["intel_pstate/no_turbo", "cpufreq/boost"])
def test_turbo_is_read_and_set_where_the_driver_has_it(tmp_path: Path, file: str) -> None:
    node = Machine.make(tmp_path)
    path = node.path(f"/sys/devices/system/cpu/{file}")
    path.parent.mkdir(parents=True)
    path.write_text("1\n" if "no_turbo" in file else "0\n")
    printed = node.shell(machine.check_turbo.command).stdout.strip()
    result = one(judge(node1=said(printed, machine.check_turbo)), "node1", "turbo")
    assert result.verdict == "warn"

    node.shell(shlex.split(result.remedy)[-1])

    assert node.shell(machine.check_turbo.command).stdout == "0\n"


def test_an_unreachable_node_fails_only_the_ssh_check() -> None:
    lost = NodeAnswer("node1", False, reason="no route")
    ill = NodeAnswer("node2", True, reason="Segmentation fault")

    results = check_nodes({**answers("node0"), "node1": lost, "node2": ill}, ON_AWS)

    assert [r.check for r in results if r.node in ("node1", "node2")] == ["ssh", "ssh"]
    assert one(results, "node1", "ssh").found == "the head can't connect over SSH: no route"
    assert one(results, "node2", "ssh").found == "the probe failed: Segmentation fault"
    missing = one(check_nodes(answers("node0"), ON_AWS), "node2", "ssh")
    assert (missing.verdict, missing.found) == ("fail", "not in the head's list of nodes")
    repair = "spr-cluster repair --name bert"
    assert one(results, "node1", "ssh").remedy == f"Replace the node:\n{repair}"
    # `repair` alone would keep it.
    look, _, end = one(results, "node2", "ssh").remedy.partition("\nIf ")
    assert look.endswith("node2 -- 'df -h; python3 -V'")
    assert end.endswith(
        f"aws ec2 terminate-instances --region us-east-1 --instance-ids i-2\n{repair}"
    )


@pytest.mark.parametrize(
    ("ahead", "verdict"), [(0.3, ""), (1.5, ""), (3.0, "warn"), (90.0, "fail"), (-90.0, "fail")]
)
def test_a_clock_is_judged_by_its_offset_minus_the_measurement_error(
    ahead: float, verdict: str
) -> None:
    clocks = {node: (ahead if node == "node1" else 0.0, 1.0) for node in NODES}

    assert verdicts_of(check_nodes(answers(), ON_AWS, clocks)) == (
        [("node1", "clock", verdict)] if verdict else []
    )


def test_a_wrong_clock_of_the_head_is_blamed_on_the_head() -> None:
    clocks = {node: (0.0 if node == "node0" else -90.0, 0.0) for node in NODES}

    results = check_nodes(answers(), ON_AWS, clocks)

    assert verdicts_of(results) == [("node0", "clock", "fail")]
    assert "90.0 s (± 0 us) ahead of the other nodes" in one(results, "node0", "clock").found


def with_mtu(mtu: int, *nodes: str) -> dict[str, Any]:
    return {node: {"mtus": {ON_AWS.addresses[node]: mtu}} for node in nodes}


def test_different_mtus_fail_even_if_the_head_or_most_nodes_have_the_small_one() -> None:
    mixed, alike = (judge(**with_mtu(1500, *nodes)) for nodes in (NODES[:2], NODES))

    assert verdicts_of(mixed) == [("node0", "mtu", "fail"), ("node1", "mtu", "fail")]
    assert verdicts_of(alike) == [(node, "mtu", "warn") for node in NODES]


def test_with_ena_express_its_mtu_is_right_and_the_usual_one_is_not() -> None:
    expected = replace(ON_AWS, mtu=8900)
    set_up, one_is_not = (judge(expected, **with_mtu(8900, *nodes)) for nodes in (NODES, NODES[:2]))

    assert verdicts_of(set_up) == []
    assert verdicts_of(one_is_not) == [("node2", "mtu", "fail")]
    found = one(one_is_not, "node2", "mtu")
    assert found.wanted == "8900, the MTU of ENA Express"
    assert found.remedy.endswith("'sudo ip link set ens5 mtu 8900'")


def test_a_node_is_not_blamed_for_what_the_others_lack() -> None:
    lacking: dict[str, Any] = {"tcmalloc": None, "mark": None}

    results = judge(node0=lacking, node1=lacking)

    assert verdicts_of(results) == [
        (node, check, "fail") for check in ("tcmalloc", "stack") for node in NODES[:2]
    ]
    other = judge(ON_AWS, **{node: {"mark": "0123"} for node in NODES})
    assert verdicts_of(other) == [(node, "stack", "warn") for node in NODES]


def test_problems_are_summarized_in_half_a_line() -> None:
    results = judge(node1={"tcmalloc": None}, node2=said("1", machine.check_turbo))

    assert summarize_problems(judge(), ON_AWS) == ""
    assert summarize_problems(results, ON_AWS) == (
        "; problems: node1: tcmalloc: missing; node2: turbo: off "
        "(details: spr-cluster verify --name bert)"
    )
