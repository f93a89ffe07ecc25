"""What the nodes found out about one another, and which node is named for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.verify.checks.network import blame, check_links
from cluster.verify.network_probe import Links, parse_links, plan_peers
from tests.cluster.verify.checks.fleet import IN_CONTAINERS, NODES, ON_AWS, one, told

PAIRS = [(a, b) for a in NODES for b in NODES if a != b]
RING = [("node0", "node1"), ("node1", "node2"), ("node2", "node0")]


def links(
    silent: dict[str, str] | None = None,
    reach: dict[tuple[str, str], dict[str, Any]] | None = None,
    ssh: dict[tuple[str, str], str] | None = None,
    send: dict[tuple[str, str], dict[str, Any]] | None = None,
) -> Links:
    """Good ways between three nodes, less what is wrong with these pairs."""

    def stage(pairs: list[tuple[str, str]], tell: Any) -> dict[str, dict[str, Any]]:
        return {a: {b: tell(a, b) for x, b in pairs if x == a} for a in NODES}

    def tell_reach(a: str, b: str) -> dict[str, Any]:
        wrong = (reach or {}).get((a, b), {})
        good = {"round_trip": 6e-5, "shortest": 5e-5, "clock": 0.0}
        return {"address": ON_AWS.addresses[b], **({} if "error" in wrong else good), **wrong}

    def tell_ssh(a: str, b: str) -> dict[str, Any]:
        return {"error": ssh[a, b]} if ssh and (a, b) in ssh else {}

    answer = {
        "silent": silent or {},
        "reach": stage(PAIRS, tell_reach),
        "ssh": stage(PAIRS, tell_ssh),
        "send": stage(RING, lambda a, b: (send or {}).get((a, b), {"gbit": 20.0})),
    }
    return parse_links(answer, all_pairs=True)


def test_good_ways_pass_all_checks() -> None:
    results = check_links(links(), ON_AWS)

    assert told(results, "warn", "fail", "unknown") == []
    assert {r.check for r in results} == {
        *("names", "ports", "ssh pairs", "latency", "bandwidth", "clock", "pairs"),
    }
    assert one(results, "cluster", "pairs").found == "all pairs of nodes tried (6)"


def test_a_node_whose_ports_are_closed_is_named_not_those_that_try() -> None:
    closed = {(a, "node1"): {"error": "timed out"} for a in ("node0", "node2")}

    results = check_links(links(reach=closed), ON_AWS)

    assert told(results) == [("node1", "ports", "fail")]
    result = one(results, "node1", "ports")
    assert result.found == "node0, node2 can't reach it: timed out"
    assert "spr-cluster up --name bert opens the security group" in result.remedy


def test_a_node_that_lets_nothing_out_is_named() -> None:
    closed = {("node2", b): {"error": "timed out"} for b in ("node0", "node1")}

    results = check_links(links(reach=closed), ON_AWS)

    assert told(results) == [("node2", "ports", "fail")]
    assert one(results, "node2", "ports").found == "it can't reach node0, node1: timed out"


def test_a_name_that_leads_elsewhere_is_found_where_it_does() -> None:
    wrong = {("node1", "node2"): {"address": "10.0.0.9", "error": "timed out"}}

    results = check_links(links(reach=wrong), ON_AWS)

    assert told(results) == [("node1", "names", "fail")]
    assert one(results, "node1", "names").found == "node2 is 10.0.0.9"
    assert one(results, "node1", "names").wanted == "node2 is 172.31.0.12"
    assert one(results, "node1", "names").remedy.startswith(
        "spr-cluster ssh --name bert node0 -- 'sed -n \"/^# spr-cluster begin/,"
    )


def test_a_refused_login_is_found() -> None:
    refused = {(a, "node2"): "Permission denied (publickey)." for a in ("node0", "node1")}

    results = check_links(links(ssh=refused), ON_AWS)

    assert told(results) == [("node2", "ssh pairs", "fail")]
    found = one(results, "node2", "ssh pairs").found
    assert found == "node0, node1 can't reach it: Permission denied (publickey)."


def test_a_node_that_hangs_is_named() -> None:
    results = check_links(links(silent={"node1": "no answer within 60 s"}), ON_AWS)

    assert told(results) == [("node1", "answers", "fail")]
    assert not [r for r in results if r.node == "node1" and r.check in ("names", "ports")]


@pytest.mark.parametrize(
    ("speed", "verdict"),
    [({"gbit": 7.0}, "warn"), ({"gbit": 8.0}, ""), ({"error": "timed out"}, "fail")],
)
def test_bandwidth_is_measured_by_the_type(speed: dict[str, Any], verdict: str) -> None:
    results = check_links(links(send={("node1", "node2"): speed}), ON_AWS)

    assert told(results) == ([("node1", "bandwidth", verdict)] if verdict else [])
    assert not verdict or "7.5 Gbit/s or more" in one(results, "node1", "bandwidth").wanted


def test_without_a_known_network_the_nodes_are_compared() -> None:
    slow = {("node1", "node2"): {"gbit": 0.4}}
    same = {pair: {"gbit": 0.4} for pair in RING}

    assert told(check_links(links(send=slow), IN_CONTAINERS)) == [("node1", "bandwidth", "warn")]
    assert told(check_links(links(send=same), IN_CONTAINERS)) == []


def test_slow_round_trips_are_a_warning() -> None:
    slow = {("node1", b): {"round_trip": 2e-3} for b in ("node0", "node2")}

    results = check_links(links(reach=slow), ON_AWS)

    assert told(results) == [("node1", "latency", "warn")]
    assert one(results, "node1", "latency").found == "2000 us (slowest peer 2000 us)"


def test_a_skewed_clock_is_seen_by_the_head_within_microseconds() -> None:
    results = check_links(links(reach={("node0", "node2"): {"clock": 2.0}}), ON_AWS)

    assert told(results) == [("node2", "clock", "warn")]


def test_many_nodes_are_tried_in_a_ring_and_with_the_head_and_that_is_said() -> None:
    nodes = [f"node{rank}" for rank in range(17)]

    peers = plan_peers(nodes, bandwidth=True)

    assert peers["reach"]["node5"] == ["node6", "node0"]
    assert peers["reach"]["node16"] == ["node0"]
    assert peers["reach"]["node0"] == nodes[1:]
    assert peers["ssh"]["node5"] == ["node6"]
    assert peers["send"]["node16"] == ["node0"]
    assert max(map(len, plan_peers(nodes[:16], bandwidth=False)["ssh"].values())) == 15
    result = one(check_links(replace(links(), all_pairs=False), ON_AWS), "cluster", "pairs")
    assert result.verdict.value == "unknown"
    assert result.found.startswith("6 of 6 pairs tried: each node with the next one and the head")


def test_nobody_is_asked_twice_at_once_by_two_nodes() -> None:
    peers = plan_peers(["a", "b", "c", "d"], bandwidth=False)["ssh"]

    for turn in range(3):
        assert sorted(peers[node][turn] for node in "abcd") == list("abcd")


def test_blame_names_as_few_nodes_as_explain_all_failures() -> None:
    failed = dict.fromkeys(
        [("a", "x"), ("b", "x"), ("c", "x"), ("y", "a"), ("y", "b"), ("y", "c")], "why"
    )

    assert sorted(blame(failed)) == ["x", "y"]
    assert blame({("a", "b"): "why"}) == {"b": {("a", "b"): "why"}}
    assert blame({}) == {}
