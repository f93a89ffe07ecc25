"""Each lie of a node is found by the check that is for it, and by no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.verify.checks import check_nodes, summarize
from cluster.verify.node_probe import NodeAnswer
from tests.cluster.verify.checks.fleet import (
    IN_CONTAINERS,
    NODES,
    ON_AWS,
    STACK,
    answer,
    judge,
    one,
    told,
)

_TOPOLOGY = "".join(f"{cpu},{cpu % 16},0,0\n" for cpu in range(32))
_NO_SMT = "".join(f"{cpu},{cpu},0,0\n" for cpu in range(32))
_GIB = 1 << 30

# What node1 says, the check that names it, its verdict, and a part of what is said of it.
LIES: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"processor": {"amx": []}}, "amx", "fail", "no AMX: Xeon lacks amx_bf16, amx_int8, amx_tile"),
    ({"processor": {"amx": ["amx_tile", "amx_int8"]}}, "amx", "fail", "lacks amx_bf16"),
    ({"processor": {"tile_data": "EINVAL"}}, "amx", "fail", "the kernel's permission (EINVAL)"),
    ({"processor": {"topology": _TOPOLOGY, "allowed": "0-31"}}, "cores", "fail", "16 cores"),
    ({"processor": {"topology": _NO_SMT, "allowed": "0-31"}}, "cores", "warn", "32 CPUs"),
    ({"processor": {"allowed": "0-15"}}, "cores", "fail", "16 CPUs"),
    ({"kernel": "6.8.1"}, "kernel", "warn", "6.8.1"),
    ({"memory": {"total": 400 << 20}}, "memory", "fail", "400 GiB"),
    ({"memory": {"available": 50 << 20}}, "memory", "warn", "50 available"),
    ({"power": {"governors": ["performance", "powersave"]}}, "governor", "warn", "powersave"),
    ({"power": {"turbo": False}}, "turbo", "warn", "off"),
    ({"power": {"huge_pages": "never"}}, "huge pages", "warn", "never"),
    ({"power": {"clocksource": "hpet"}}, "clocksource", "warn", "hpet"),
    ({"power": {"clock_kept": False}}, "time service", "warn", "nothing keeps"),
    ({"tcmalloc": {"path": None}}, "tcmalloc", "fail", "missing"),
    ({"tcmalloc": {"error": "wrong ELF class"}}, "tcmalloc", "fail", "wrong ELF class"),
    ({"tcmalloc": {"path": "/usr/lib/x/libtcmalloc.so.5"}}, "tcmalloc", "fail", "so.5"),
    ({"in_venv": False}, "stack", "fail", "no Python that runs"),
    ({"mark": None}, "stack", "fail", "no whole installation"),
    ({"mark": "0123"}, "stack", "fail", "installation 0123"),
    ({"versions": {"torch": "2.6.0+cpu"}}, "stack", "fail", "torch 2.6.0+cpu"),
    ({"versions": {"numpy": "2.4.1"}}, "stack", "fail", "numpy 2.4.1"),
    ({"versions": {"impi-rt": None}}, "stack", "fail", "no impi-rt"),
    ({"modules": {"torch": "2.8.0"}}, "stack", "fail", "module torch 2.8.0"),
    ({"python": "3.10.9"}, "python", "warn", "3.10.9"),
    ({"disk": {"free": _GIB}}, "disk", "fail", "1 of 100 GiB free"),
    ({"disk": {"free": 5 * _GIB}}, "disk", "warn", "5 of 100 GiB free"),
    ({"disk": {"size": 20 * _GIB, "free": 15 * _GIB}}, "disk", "warn", "15 of 20"),
    ({"disk": {"error": "Read-only file system"}}, "disk", "fail", "Read-only"),
    ({"network": {"own_addresses": ["127.0.1.1"]}}, "hostname", "fail", "127.0.1.1"),
    ({"network": {"own_addresses": []}}, "hostname", "fail", "no address"),
    (
        {"network": {"interfaces": {"172.31.0.11": {"name": "ens5", "mtu": 1500}}}},
        *("mtu", "fail", "ens5: 1500"),
    ),
    ({"network": {"interfaces": {}}}, "mtu", "fail", "no interface has 172.31.0.11"),
)


@pytest.mark.parametrize(
    ("lie", "check", "verdict", "found"), LIES, ids=[str(lie[0]) for lie in LIES]
)
def test_a_lie_is_named_with_its_check_and_remedy(
    lie: dict[str, Any], check: str, verdict: str, found: str
) -> None:
    results = judge(node1=lie)

    assert told(results) == [("node1", check, verdict)]
    result = one(results, "node1", check)
    assert found in result.found
    assert result.wanted
    assert result.remedy


def test_good_machines_pass_all_checks() -> None:
    results = judge()

    assert told(results, "warn", "fail", "unknown") == []
    assert len(results) == len(NODES) * len({r.check for r in results}) == 51


def test_what_a_machine_does_not_have_is_not_known_rather_than_wrong() -> None:
    bare: dict[str, Any] = {"governors": [], "turbo": None, "huge_pages": None, "clocksource": None}
    results = judge(node1={"power": {**bare, "clock_kept": None}})

    assert told(results) == []
    assert [check for _, check, _ in told(results, "unknown")] == [
        *("governor", "turbo", "huge pages", "clocksource", "time service"),
    ]


def test_containers_are_compared_and_their_host_is_not_judged() -> None:
    one_core = {"topology": "0,0,0,0\n1,1,0,0", "allowed": "0", "amx": [], "tile_data": "ENOTSUP"}
    host = {"governors": ["powersave"], "turbo": False, "clock_kept": False}
    small = {"processor": one_core, "power": host, "memory": {"total": 8 << 20}}

    results = judge(IN_CONTAINERS, **dict.fromkeys(NODES, small))

    assert told(results) == [(node, "amx", "warn") for node in NODES]
    assert one(results, "node1", "amx").found.startswith("no AMX")
    assert one(results, "node1", "cores").found == "1 core, 1 socket, 1 NUMA node, 1 CPU"
    assert one(results, "node1", "governor").found == "not judged, the host's: powersave"
    assert one(results, "node1", "memory").verdict.value == "unknown"


def test_a_container_with_other_cores_than_the_others_fails() -> None:
    wide = {"topology": "0,0,0,0\n1,1,0,0", "allowed": "0-1"}
    cut = {**wide, "allowed": "1"}

    results = judge(
        IN_CONTAINERS,
        node0={"processor": wide},
        node1={"processor": cut},
        node2={"processor": wide},
    )

    assert told(results) == [("node1", "cores", "fail")]
    assert "as the other nodes: 2 cores" in one(results, "node1", "cores").wanted


def test_without_amx_nothing_says_ok_even_where_it_may_be_missing() -> None:
    lies: tuple[dict[str, Any], ...] = ({"amx": []}, {"tile_data": "ENOTSUP"})
    for lie in lies:
        results = judge(replace(ON_AWS, amx_required=False), node2={"processor": lie})
        assert one(results, "node2", "amx").verdict.value == "warn"
        assert "no AMX" in one(results, "node2", "amx").found


def test_an_unreached_node_is_named_and_nothing_else_is_said_of_it() -> None:
    answers = [answer("node0"), NodeAnswer("node1", False, reason="no route"), answer("node2")]

    results = check_nodes(answers, ON_AWS)

    assert [r.check for r in results if r.node == "node1"] == ["ssh"]
    assert one(results, "node1", "ssh").found == "the head can't: no route"
    assert "spr-cluster repair --name bert" in one(results, "node1", "ssh").remedy


def test_a_node_that_the_head_does_not_know_is_named() -> None:
    results = check_nodes([answer("node0"), answer("node1")], ON_AWS)

    assert told(results) == [("node2", "ssh", "fail")]


@pytest.mark.parametrize(
    ("ahead", "verdict"), [(0.3, ""), (1.5, ""), (3.0, "warn"), (90.0, "fail"), (-90.0, "fail")]
)
def test_a_clock_is_wrong_as_far_as_the_measurement_proves_it(ahead: float, verdict: str) -> None:
    answers = [
        replace(answer(node), clock_s=ahead if node == "node1" else 0.0, clock_error_s=1.0)
        for node in NODES
    ]

    assert told(check_nodes(answers, ON_AWS)) == ([("node1", "clock", verdict)] if verdict else [])


def test_where_the_heads_clock_is_wrong_the_head_is_named() -> None:
    answers = [replace(answer(n), clock_s=0.0 if n == "node0" else -90.0) for n in NODES]

    results = check_nodes(answers, ON_AWS)

    assert told(results) == [("node0", "clock", "fail")]
    assert "90.0 s (± 0 us) ahead of the other nodes" in one(results, "node0", "clock").found


def test_nodes_whose_mtus_differ_fail_also_where_the_head_or_most_have_the_small_one() -> None:
    def small(node: str) -> dict[str, Any]:
        interface = {"name": "ens5", "mtu": 1500}
        return {"network": {"interfaces": {ON_AWS.addresses[node]: interface}}}

    mixed = judge(ON_AWS, **{node: small(node) for node in NODES[:2]})
    alike = judge(ON_AWS, **{node: small(node) for node in NODES})

    assert told(mixed) == [("node0", "mtu", "fail"), ("node1", "mtu", "fail")]
    assert told(alike) == [(node, "mtu", "warn") for node in NODES]


def test_a_node_is_not_blamed_for_what_most_others_lack() -> None:
    lacking: dict[str, Any] = {"tcmalloc": {"path": None}, "mark": None}

    results = judge(node0=lacking, node1=lacking)

    assert told(results) == [
        (node, check, "fail") for check in ("tcmalloc", "stack") for node in NODES[:2]
    ]


def test_all_nodes_of_another_installation_are_a_warning_only() -> None:
    results = judge(ON_AWS, **{node: {"mark": "0123"} for node in NODES})

    assert told(results) == [(node, "stack", "warn") for node in NODES]


def test_the_remedy_for_a_version_is_pips_own_line() -> None:
    remedy = one(judge(node2={"versions": {"torch": "2.6.0"}}), "node2", "stack").remedy

    assert remedy.startswith("spr-cluster ssh --name bert node2 -- '/opt/spr-cluster/venv/bin/pip ")
    assert "torch==2.7.0" in remedy
    assert all(url in remedy for url in STACK.indexes)


def test_at_the_end_of_up_what_is_wrong_is_told_in_half_a_line() -> None:
    results = judge(node1={"tcmalloc": {"path": None}}, node2={"power": {"turbo": False}})

    assert summarize(judge(), ON_AWS) == ""
    assert summarize(results, ON_AWS) == (
        "; not as it should be: node1: tcmalloc: missing; node2: turbo: off "
        "(what to do: spr-cluster verify --name bert)"
    )
