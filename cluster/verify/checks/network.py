"""Do the nodes reach one another, by name, on any port, by SSH, fast? Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from cluster.verify.checks.reachability import check_clocks, mend_names
from cluster.verify.checks.result import CLUSTER, CheckResult, Expected, Verdict, count
from cluster.verify.network_probe import Links

# Inside an AWS zone; a cluster placement group has about 50 us.
_SLOW_TRIP_S = 1e-3
# One node far from what the others have, on machines whose network nobody can name.
_TRIP_FACTOR, _SPEED_FACTOR = 10.0, 4.0
# Of the type's own figure: four flows in Python, each of at most 5 to 25 Gbit/s on AWS.
_SPEED_SHARE = 0.3
_MOST_NAMED = 4

Pair = tuple[str, str]


def check_links(links: Links, expected: Expected) -> tuple[CheckResult, ...]:
    """All that the nodes found out about one another."""
    asked = [node for node in expected.addresses if node not in links.silent]
    return (
        *_check_silent(links, expected),
        *check_names(links, asked, expected),
        *check_ports(links, asked, expected),
        *check_ssh_pairs(links, asked, expected),
        *check_latency(links, asked, expected),
        *check_bandwidth(links, asked, expected),
        *_check_clock(links, expected),
        describe_pairs(links, len(expected.addresses)),
    )


def _check_silent(links: Links, expected: Expected) -> Iterator[CheckResult]:
    for node, reason in links.silent.items():
        remedy = f"{expected.command('repair')} replaces nodes that do not answer"
        yield CheckResult(node, "answers", Verdict.FAIL, reason, "an answer in time", remedy)


def _check_clock(links: Links, expected: Expected) -> Iterator[CheckResult]:
    """The head's own measurements, which are finer than those over SSH."""
    head = next(iter(expected.addresses))
    clocks = {
        link.target: (link.clock_s, link.clock_error_s)
        for link in links.links
        if link.source == head and link.clock_s is not None
    }
    yield from check_clocks({head: (0.0, 0.0), **clocks} if clocks else {}, expected)


def describe_pairs(links: Links, nodes: int) -> CheckResult:
    """Which pairs were tried: where it is not all of them, that is said."""
    tried = len(links.links)
    if links.all_pairs:
        found = f"all pairs of nodes tried ({tried})"
        return CheckResult(CLUSTER, "pairs", Verdict.OK, found)
    found = (
        f"{tried} of {nodes * (nodes - 1)} pairs tried: each node with the next one and the head; "
        "SSH along the ring"
    )
    return CheckResult(CLUSTER, "pairs", Verdict.UNKNOWN, found)


def blame(failed: Mapping[Pair, str]) -> dict[str, dict[Pair, str]]:
    """Which nodes the failed pairs are about: the fewest that all of them have in common, about so."""
    left, blamed = dict(failed), dict[str, dict[Pair, str]]()
    while left:
        # As target first: a node that others can't reach is named, not those that try.
        counts = Counter([node for pair in left for node in reversed(pair)])
        node = counts.most_common(1)[0][0]
        blamed[node] = {pair: why for pair, why in left.items() if node in pair}
        left = {pair: why for pair, why in left.items() if node not in pair}
    return blamed


def describe_failures(node: str, failed: Mapping[Pair, str]) -> str:
    """The failures that one node is blamed for, grouped by direction and reason."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for (source, target), why in failed.items():
        incoming = target == node
        groups.setdefault((incoming, why), []).append(source if incoming else target)
    parts = []
    for (incoming, why), others in groups.items():
        names = name_some(others)
        way = f"{names} can't reach it" if incoming else f"it can't reach {names}"
        parts.append(f"{way}: {why}")
    return "; ".join(parts)


def name_some(nodes: Sequence[str]) -> str:
    """Nodes by name, the first few of many."""
    more = len(nodes) - _MOST_NAMED
    return ", ".join(nodes[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_names(links: Links, asked: Sequence[str], expected: Expected) -> Iterator[CheckResult]:
    """On each node the others' names lead to their private addresses."""
    if not links.links:
        return
    for node in asked:
        wrong = [
            f"{link.target} is {link.address or 'unknown'}"
            for link in links.links
            if link.source == node and link.address != expected.addresses[link.target]
        ]
        if not wrong:
            found = "the other nodes' names lead to their private addresses"
            yield CheckResult(node, "names", Verdict.OK, found)
            continue
        names = [text.split()[0] for text in wrong]
        wanted = ", ".join(f"{name} is {expected.addresses[name]}" for name in names[:_MOST_NAMED])
        remedy = mend_names(node, expected)
        yield CheckResult(node, "names", Verdict.FAIL, name_some(wrong), wanted, remedy)


def check_ports(links: Links, asked: Sequence[str], expected: Expected) -> Iterator[CheckResult]:
    """Each node takes connections from the others on a port that nobody opened for it."""
    if not links.links:
        return
    # Where a name leads elsewhere, the port behind it is somebody else's.
    failed = {
        (link.source, link.target): link.error
        for link in links.links
        if link.error and link.address == expected.addresses[link.target]
    }
    blamed = blame(failed)
    wanted = "any TCP port is open between the nodes"
    for node in asked:
        if node not in blamed:
            yield CheckResult(node, "ports", Verdict.OK, wanted)
            continue
        look = expected.on_node(node, "sudo iptables -S; sudo nft list ruleset; sudo ufw status")
        remedy = (
            f"{expected.command('up')} opens the security group; a firewall on the node: {look}"
        )
        found = describe_failures(node, blamed[node])
        yield CheckResult(node, "ports", Verdict.FAIL, found, wanted, remedy)


def check_ssh_pairs(
    links: Links, asked: Sequence[str], expected: Expected
) -> Iterator[CheckResult]:
    """Each node enters the others without a password."""
    if not links.ssh:
        return
    blamed = blame({pair: why for pair, why in links.ssh.items() if why})
    wanted = "the nodes enter one another without a password"
    for node in asked:
        if node not in blamed:
            yield CheckResult(node, "ssh pairs", Verdict.OK, wanted)
            continue
        found = describe_failures(node, blamed[node])
        source, target = next(iter(blamed[node]))
        remedy = f"what it says: {expected.on_node(source, f'ssh -v {target} true')}"
        yield CheckResult(node, "ssh pairs", Verdict.FAIL, found, wanted, remedy)


def check_latency(links: Links, asked: Sequence[str], expected: Expected) -> Iterator[CheckResult]:
    """The median round trip of a small message over TCP, from each node to the others."""
    trips = {
        node: [way.round_trip_s for way in links.links if way.source == node and way.round_trip_s]
        for node in asked
    }
    medians = {node: statistics.median(found) for node, found in trips.items() if found}
    if not medians:
        return
    limit = _SLOW_TRIP_S if expected.machine else _TRIP_FACTOR * statistics.median(medians.values())
    for node, median in medians.items():
        found = f"{median * 1e6:.0f} us (slowest peer {max(trips[node]) * 1e6:.0f} us)"
        if median <= limit:
            yield CheckResult(node, "latency", Verdict.OK, found)
            continue
        wanted = f"at most {limit * 1e6:.0f} us"
        remedy = f"does something else run? {expected.on_node(node, 'top -bn1 | head -15')}"
        if expected.machine:
            remedy += "; a cluster without --no-placement-group has its machines side by side"
        yield CheckResult(node, "latency", Verdict.WARN, found, wanted, remedy)


def check_bandwidth(
    links: Links, asked: Sequence[str], expected: Expected
) -> Iterator[CheckResult]:
    """All nodes send to the next one at the same time, each over four connections."""
    speeds = [speed for speed in links.gbit.values() if isinstance(speed, float)]
    least = statistics.median(speeds) / _SPEED_FACTOR if speeds else 0.0
    wanted = f"{least:.2f} Gbit/s or more, as the other nodes"
    machine = expected.machine
    if machine and machine.gbit:
        least = machine.gbit * _SPEED_SHARE
        wanted = f"{least:.1f} Gbit/s or more; {machine.name} has {machine.gbit:g}"
    closed = {(link.source, link.target) for link in links.links if link.error}
    for (node, peer), speed in links.gbit.items():
        if node not in asked:
            continue
        if (node, peer) in closed:
            found = f"not measured: no connection to {peer}"
            yield CheckResult(node, "bandwidth", Verdict.UNKNOWN, found)
        else:
            yield _judge_speed(node, peer, speed, (least, wanted), expected)


def _judge_speed(
    node: str, peer: str, speed: float | str, least: tuple[float, str], expected: Expected
) -> CheckResult:
    if not isinstance(speed, float):
        remedy = f"small messages pass and a flood does not: the same MTU all the way to {peer}?"
        return CheckResult(node, "bandwidth", Verdict.FAIL, f"to {peer}: {speed}", least[1], remedy)
    found = f"{speed:.2f} Gbit/s to {peer}"
    if speed >= least[0]:
        return CheckResult(node, "bandwidth", Verdict.OK, found)
    remedy = f"does something else use its network? {expected.on_node(node, 'ss -ti | head -30')}"
    return CheckResult(node, "bandwidth", Verdict.WARN, found, least[1], remedy)


def describe_single() -> CheckResult:
    """What is said of a cluster of one node."""
    return CheckResult(CLUSTER, "pairs", Verdict.OK, f"{count(1, 'node')}: no others to reach")
