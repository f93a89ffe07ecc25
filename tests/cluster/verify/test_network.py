"""Checks of the network between the nodes, and which node is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.verify.network import NetworkReport, check_network, parse_report, plan_peers
from cluster.verify.verify import check_nodes
from infra.instance_types import INSTANCE_TYPES
from tests.cluster.verify.fleet import IN_CONTAINERS, NODES, ON_AWS, answers, one, verdicts_of

PAIRS = [(a, b) for a in NODES for b in NODES if a != b]
RING = [("node0", "node1"), ("node1", "node2"), ("node2", "node0")]


def measured(
    silent: dict[str, str] | None = None,
    reach: dict[tuple[str, str], dict[str, Any]] | None = None,
    ssh: dict[tuple[str, str], str] | None = None,
    send: dict[tuple[str, str], dict[str, Any]] | None = None,
) -> NetworkReport:
    """A good network of three nodes, except for these pairs."""

    def stage(pairs: list[tuple[str, str]], answer: Any) -> dict[str, dict[str, Any]]:
        return {a: {b: answer(a, b) for x, b in pairs if x == a} for a in NODES}

    def answer_reach(a: str, b: str) -> dict[str, Any]:
        wrong = (reach or {}).get((a, b), {})
        good = {"round_trip": 6e-5, "shortest": 5e-5, "clock": 0.0}
        return {"address": ON_AWS.addresses[b], **({} if "error" in wrong else good), **wrong}

    def answer_ssh(a: str, b: str) -> dict[str, Any]:
        return {"error": ssh[a, b]} if ssh and (a, b) in ssh else {}

    report = {
        "silent": silent or {},
        "reach": stage(PAIRS, answer_reach),
        "ssh": stage(PAIRS, answer_ssh),
        "send": stage(RING, lambda a, b: (send or {}).get((a, b), {"gbit": 20.0})),
    }
    return parse_report(report, all_pairs=True)


def test_a_good_network_passes_all_checks_and_a_node_that_hangs_is_named() -> None:
    results = check_network(measured(), ON_AWS)

    assert verdicts_of(results, "warn", "fail", "skipped") == []
    assert {r.check for r in results} == {
        *("names", "ports", "ssh pairs", "latency", "bandwidth", "pairs"),
    }
    assert one(results, "cluster", "pairs").found == "all 6 ordered pairs of nodes tested"
    results = check_network(measured(silent={"node1": "no answer within 60 s"}), ON_AWS)
    assert verdicts_of(results) == [("node1", "answers", "fail")]
    assert not [r for r in results if r.node == "node1" and r.check in ("names", "ports")]


def each(sources: str, targets: str, answer: Any) -> dict[tuple[str, str], Any]:
    return {(f"node{a}", f"node{b}"): answer for a in sources for b in targets}


CLOSED: dict[str, Any] = {"error": "closed"}
ELSEWHERE = {"address": "10.0.0.9", **CLOSED}
SLOW = {"round_trip": 2e-3}


_OPEN = "Open the security group:\nspr-cluster up --name bert\n"
_LOOK = "Look for a firewall on the node:\n"
_NAMES = "spr-cluster ssh --name bert node0 -- 'sed -n \"/^# spr-cluster begin/,"


# What the nodes measure, the one failure, and what is said of it.
@pytest.mark.parametrize(
    ("wrong", "failure", "found", "remedy"),
    [
        ({"reach": each("02", "1", CLOSED)}, "node1: ports", "node0, node2 can't reach it: closed", _OPEN),
        ({"reach": each("2", "01", CLOSED)}, "node2: ports", "it can't reach node0, node1: closed", _LOOK),
        ({"reach": each("1", "2", ELSEWHERE)}, "node1: names", "node2 is 10.0.0.9", _NAMES),
        ({"ssh": each("01", "2", "no")}, "node2: ssh pairs", "node0, node1 can't reach it: no", "ssh -v"),
        ({"reach": each("1", "02", SLOW)}, "node1: latency", "2000 us (slowest peer 2000 us)", "what else"),
    ],
)  # fmt: skip
def test_a_fault_is_found_once_on_the_node_that_has_it(
    wrong: dict[str, Any], failure: str, found: str, remedy: str
) -> None:
    results = check_network(measured(**wrong), ON_AWS)

    node, check = failure.split(": ")
    assert verdicts_of(results) == [(node, check, "warn" if check == "latency" else "fail")]
    result = one(results, node, check)
    assert result.found == found
    assert remedy in result.remedy
    assert check != "names" or result.wanted == "node2 is 172.31.0.12"


@pytest.mark.parametrize(
    ("size", "speed", "verdict"),
    [
        ("r7iz.metal-16xl", {"gbit": 7.0}, "warn"),
        ("r7iz.metal-16xl", {"gbit": 8.0}, ""),
        ("r7iz.metal-16xl", {"error": "timed out"}, "fail"),
        ("c8i.metal-96xl", {"gbit": 19.0}, ""),  # four flows of at most 5
    ],
)
def test_bandwidth_is_compared_with_the_instance_type(
    size: str, speed: dict[str, Any], verdict: str
) -> None:
    expected = replace(ON_AWS, machine=INSTANCE_TYPES[size])
    results = check_network(measured(send={("node1", "node2"): speed}), expected)

    assert verdicts_of(results) == ([("node1", "bandwidth", verdict)] if verdict else [])
    assert not verdict or "at least 7.5 Gbit/s" in one(results, "node1", "bandwidth").wanted


def test_on_an_unknown_network_the_nodes_are_compared_with_each_other() -> None:
    slow = {("node1", "node2"): {"gbit": 0.4}}
    same = {pair: {"gbit": 0.4} for pair in RING}

    assert verdicts_of(check_network(measured(send=slow), IN_CONTAINERS)) == [
        ("node1", "bandwidth", "warn")
    ]
    assert verdicts_of(check_network(measured(send=same), IN_CONTAINERS)) == []


def test_a_skewed_clock_is_measured_by_the_head() -> None:
    report = measured(reach={("node0", "node2"): {"clock": 2.0}})

    results = check_nodes(answers(), ON_AWS, report.clocks("node0"))

    assert verdicts_of(results) == [("node2", "clock", "warn")]


def test_many_nodes_are_tested_in_a_ring_and_with_the_head() -> None:
    nodes = [f"node{rank}" for rank in range(17)]

    peers = plan_peers(nodes, bandwidth=True)

    assert peers["reach"]["node5"] == ["node6", "node0"]
    assert peers["reach"]["node16"] == ["node0"]
    assert peers["reach"]["node0"] == nodes[1:]
    assert peers["ssh"]["node5"] == ["node6"]
    assert peers["send"]["node16"] == ["node0"]
    few = plan_peers(nodes[:16], bandwidth=False)["ssh"]
    for turn in range(15):  # no two nodes start with the same peer
        assert {few[node][turn] for node in few} == set(nodes[:16])
    result = one(check_network(replace(measured(), all_pairs=False), ON_AWS), "cluster", "pairs")
    assert result.verdict.value == "skipped"
    start = "6 of 6 ordered pairs tested: each node with the next one and the head"
    assert result.found.startswith(start)
