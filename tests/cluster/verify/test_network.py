"""Checks of the network between the nodes, and which node is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.verify.network import NetworkReport, blame, check_network, parse_report, plan_peers
from cluster.verify.verify import check_nodes
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


def test_a_good_network_passes_all_checks() -> None:
    results = check_network(measured(), ON_AWS)

    assert verdicts_of(results, "warn", "fail", "skipped") == []
    assert {r.check for r in results} == {
        *("names", "ports", "ssh pairs", "latency", "bandwidth", "pairs"),
    }
    assert one(results, "cluster", "pairs").found == "all 6 ordered pairs of nodes tested"


def test_the_node_with_closed_ports_is_blamed_not_its_peers() -> None:
    closed = {(a, "node1"): {"error": "timed out"} for a in ("node0", "node2")}

    results = check_network(measured(reach=closed), ON_AWS)

    assert verdicts_of(results) == [("node1", "ports", "fail")]
    result = one(results, "node1", "ports")
    assert result.found == "node0, node2 can't reach it: timed out"
    assert "Open the security group:\nspr-cluster up --name bert\n" in result.remedy


def test_a_node_that_blocks_outgoing_connections_is_blamed() -> None:
    closed = {("node2", b): {"error": "timed out"} for b in ("node0", "node1")}

    results = check_network(measured(reach=closed), ON_AWS)

    assert verdicts_of(results) == [("node2", "ports", "fail")]
    assert one(results, "node2", "ports").found == "it can't reach node0, node1: timed out"


def test_a_wrong_name_is_found_on_the_node_that_resolves_it() -> None:
    wrong = {("node1", "node2"): {"address": "10.0.0.9", "error": "timed out"}}

    results = check_network(measured(reach=wrong), ON_AWS)

    assert verdicts_of(results) == [("node1", "names", "fail")]
    assert one(results, "node1", "names").found == "node2 is 10.0.0.9"
    assert one(results, "node1", "names").wanted == "node2 is 172.31.0.12"
    assert one(results, "node1", "names").remedy.startswith(
        "spr-cluster ssh --name bert node0 -- 'sed -n \"/^# spr-cluster begin/,"
    )


def test_a_refused_login_is_reported() -> None:
    refused = {(a, "node2"): "Permission denied (publickey)." for a in ("node0", "node1")}

    results = check_network(measured(ssh=refused), ON_AWS)

    assert verdicts_of(results) == [("node2", "ssh pairs", "fail")]
    found = one(results, "node2", "ssh pairs").found
    assert found == "node0, node1 can't reach it: Permission denied (publickey)."


def test_a_node_that_hangs_is_named() -> None:
    results = check_network(measured(silent={"node1": "no answer within 60 s"}), ON_AWS)

    assert verdicts_of(results) == [("node1", "answers", "fail")]
    assert not [r for r in results if r.node == "node1" and r.check in ("names", "ports")]


@pytest.mark.parametrize(
    ("speed", "verdict"),
    [({"gbit": 7.0}, "warn"), ({"gbit": 8.0}, ""), ({"error": "timed out"}, "fail")],
)
def test_bandwidth_is_compared_with_the_instance_type(speed: dict[str, Any], verdict: str) -> None:
    results = check_network(measured(send={("node1", "node2"): speed}), ON_AWS)

    assert verdicts_of(results) == ([("node1", "bandwidth", verdict)] if verdict else [])
    assert not verdict or "at least 7.5 Gbit/s" in one(results, "node1", "bandwidth").wanted


def test_on_an_unknown_network_the_nodes_are_compared_with_each_other() -> None:
    slow = {("node1", "node2"): {"gbit": 0.4}}
    same = {pair: {"gbit": 0.4} for pair in RING}

    assert verdicts_of(check_network(measured(send=slow), IN_CONTAINERS)) == [
        ("node1", "bandwidth", "warn")
    ]
    assert verdicts_of(check_network(measured(send=same), IN_CONTAINERS)) == []


def test_slow_round_trips_are_a_warning() -> None:
    slow = {("node1", b): {"round_trip": 2e-3} for b in ("node0", "node2")}

    results = check_network(measured(reach=slow), ON_AWS)

    assert verdicts_of(results) == [("node1", "latency", "warn")]
    assert one(results, "node1", "latency").found == "2000 us (slowest peer 2000 us)"


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
    assert max(map(len, plan_peers(nodes[:16], bandwidth=False)["ssh"].values())) == 15
    result = one(check_network(replace(measured(), all_pairs=False), ON_AWS), "cluster", "pairs")
    assert result.verdict.value == "skipped"
    assert result.found.startswith(
        "6 of 6 ordered pairs tested: each node with the next one and the head"
    )


def test_no_two_nodes_start_with_the_same_peer() -> None:
    peers = plan_peers(["a", "b", "c", "d"], bandwidth=False)["ssh"]

    for turn in range(3):
        assert sorted(peers[node][turn] for node in "abcd") == list("abcd")


def test_blame_names_the_few_nodes_that_explain_all_failures() -> None:
    failed = dict.fromkeys(
        [("a", "x"), ("b", "x"), ("c", "x"), ("y", "a"), ("y", "b"), ("y", "c")], "why"
    )

    assert sorted(blame(failed)) == ["x", "y"]
    assert blame({("a", "b"): "why"}) == {"b": {("a", "b"): "why"}}
    assert blame({}) == {}
