"""Do the nodes reach each other by name, on any port, over SSH, and fast enough?"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.verify.reachability import restore_names
from cluster.verify.results import CLUSTER, CheckResult, Expected, Verdict, name_some
from infra.errors import HostError
from provision.host import Host
from provision.on_node import network
from provision.on_node.network import STAGES
from provision.run_on_nodes import STACK_PYTHON, send

ALL_PAIRS_UP_TO = 16
_STAGE, _RESULT = "stage:", "links:"
_TITLES = {
    "reach": "names, ports, and round trips between the nodes",
    "ssh": "SSH between the nodes",
    "send": "bandwidth between the nodes",
}
_DEADLINE_S = sum(STAGES.values()) + 30
# Within an AWS zone; a cluster placement group has about 50 us.
_SLOW_TRIP_S = 1e-3
# If the network's speed is unknown, machines are compared with each other by these factors.
_TRIP_FACTOR, _SPEED_FACTOR = 10.0, 4.0
# Share of the type's bandwidth that the agent's four flows reach, and the most that is expected of them:
# outside a placement group, AWS limits a flow to 5 Gbit/s.
_SPEED_SHARE, _FLOWS_GBIT = 0.3, 15.0

Pair = tuple[str, str]
Pairs = dict[str, list[str]]


@dataclass(frozen=True)
class NetworkLink:
    """One node's measurements of another, in seconds; ``None`` if not measured.

    ``error`` is why the connection failed, ``clock_s`` how far the target's clock is ahead.
    """

    source: str
    target: str
    address: str | None
    error: str | None = None
    round_trip_s: float | None = None
    clock_s: float | None = None
    clock_error_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the link for ``--json``."""
        return {
            "from": self.source,
            "to": self.target,
            "address": self.address,
            "error": self.error,
            "round_trip_us": self.round_trip_s and round(self.round_trip_s * 1e6, 1),
        }


@dataclass(frozen=True)
class NetworkReport:
    """Measurements between the nodes. ``silent``: nodes that did not answer, with the reason.

    ``ssh`` holds an error or ``None`` by (source, target), ``gbit`` a speed in Gbit/s or an error.
    """

    silent: Mapping[str, str]
    links: tuple[NetworkLink, ...]
    ssh: Mapping[tuple[str, str], str | None]
    gbit: Mapping[tuple[str, str], float | str]
    all_pairs: bool
    """All pairs were tested; otherwise each node with the next one in a ring and with the head."""

    def clocks(self, head: str) -> dict[str, tuple[float, float]]:
        """Return each clock's lead over the head's and its error, both smaller than over SSH."""
        found = {
            link.target: (link.clock_s, link.clock_error_s)
            for link in self.links
            if link.source == head and link.clock_s is not None
        }
        return {head: (0.0, 0.0), **found} if found else {}


def plan_peers(nodes: Sequence[str], *, bandwidth: bool) -> dict[str, Pairs]:
    """Return the peers of each node by stage: all others for up to 16 nodes, else ring and head."""
    others = {name: [*nodes[rank + 1 :], *nodes[:rank]] for rank, name in enumerate(nodes)}
    ring = {name: peers[:1] for name, peers in others.items()}
    reach, ssh = others, others
    if len(nodes) > ALL_PAIRS_UP_TO:
        head = nodes[0]
        star = {name: list(dict.fromkeys([*peers, head])) for name, peers in ring.items()}
        reach = {**star, head: others[head]}
        # The head already logs in to all nodes to start the agents.
        ssh = ring
    return {"reach": reach, "ssh": ssh, **({"send": ring} if bandwidth else {})}


def probe_network(
    head: Host, nodes: Sequence[str], *, bandwidth: bool, note: Callable[[str], None]
) -> NetworkReport:
    """Run the network test on the nodes. Raises :class:`HostError` if the head can't."""
    lines: list[str] = []

    def on_text(text: str) -> None:
        for line in text.split("\n"):
            if line.startswith(_STAGE):
                note(_TITLES[line.removeprefix(_STAGE)])
            else:
                lines.append(line)

    # The head starts agents on all nodes by this plan.
    plan = {**asdict(send(network, python=STACK_PYTHON)), "nodes": nodes}
    plan |= {"peers": plan_peers(nodes, bandwidth=bandwidth)}
    agent = send(network, lines=[json.dumps(plan)])
    command = agent.render("testing the network between the nodes")
    done = head.run(command, timeout_s=_DEADLINE_S, check=False, on_text=on_text)
    result = [at for at, line in enumerate(lines) if line.startswith(_RESULT)]
    if not result:
        reason = lines[-1] if lines else f"exit code {done.exit_code}"
        raise HostError(head.name, f"testing the network between the nodes: {reason}")
    all_pairs = len(nodes) <= ALL_PAIRS_UP_TO
    # A long line arrives in pieces. Since 3.14, Python may still report pipes that nodes have closed.
    answer = "".join(lines[result[0] :]).removeprefix(_RESULT)
    return parse_report(json.JSONDecoder().raw_decode(answer)[0], all_pairs=all_pairs)


def parse_report(answer: Mapping[str, Any], *, all_pairs: bool) -> NetworkReport:
    """Parse the answer of :mod:`provision.on_node.network`."""

    def pairs(stage: str) -> dict[tuple[str, str], Mapping[str, Any]]:
        by_source = answer.get(stage, {}).items()
        return {(s, t): found for s, targets in by_source for t, found in targets.items()}

    return NetworkReport(
        silent=dict(answer["silent"]),
        links=tuple(
            NetworkLink(
                *(*pair, found["address"], found.get("error"), found.get("round_trip")),
                clock_s=found.get("clock"),
                clock_error_s=found.get("shortest", 0.0) / 2,
            )
            for pair, found in pairs("reach").items()
        ),
        ssh={pair: found.get("error") for pair, found in pairs("ssh").items()},
        gbit={pair: found.get("gbit", found.get("error")) for pair, found in pairs("send").items()},
        all_pairs=all_pairs,
    )


def check_network(report: NetworkReport, expected: Expected) -> tuple[CheckResult, ...]:
    """Check everything that the nodes measured between them."""
    answered = [node for node in expected.addresses if node not in report.silent]
    remedy = f"Replace the node:\n{expected.command('repair')}"
    return (
        *(
            CheckResult(node, "answers", Verdict.FAIL, reason, "an answer in time", remedy)
            for node, reason in report.silent.items()
        ),
        *check_names(report, answered, expected),
        *check_ports(report, answered, expected),
        *check_ssh_pairs(report, answered, expected),
        *check_latency(report, answered, expected),
        *check_bandwidth(report, answered, expected),
        describe_pairs(report, len(expected.addresses)),
    )


def describe_pairs(report: NetworkReport, nodes: int) -> CheckResult:
    """Report which pairs of nodes were tested."""
    tested = len(report.links)
    if report.all_pairs:
        return CheckResult(
            CLUSTER, "pairs", Verdict.OK, f"all {tested} ordered pairs of nodes tested"
        )
    found = (
        f"{tested} of {nodes * (nodes - 1)} ordered pairs tested: each node with the next one and "
        "the head; SSH along the ring"
    )
    return CheckResult(CLUSTER, "pairs", Verdict.SKIPPED, found)


def blame(failed: Mapping[Pair, str]) -> dict[str, dict[Pair, str]]:
    """Attribute failed pairs to few nodes: greedily, the node with the most failures."""
    left, blamed = dict(failed), dict[str, dict[Pair, str]]()
    while left:
        # Targets first: on a tie, blame the unreachable node, not those that try to reach it.
        counts = Counter([node for pair in left for node in reversed(pair)])
        node = counts.most_common(1)[0][0]
        blamed[node] = {pair: why for pair, why in left.items() if node in pair}
        left = {pair: why for pair, why in left.items() if node not in pair}
    return blamed


def describe_failures(node: str, failed: Mapping[Pair, str]) -> str:
    """Describe the failures blamed on one node, grouped by direction and reason."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for (source, target), reason in failed.items():
        incoming = target == node
        groups.setdefault((incoming, reason), []).append(source if incoming else target)
    return "; ".join(
        f"{name_some(peers)} can't reach it: {reason}"
        if incoming
        else f"it can't reach {name_some(peers)}: {reason}"
        for (incoming, reason), peers in groups.items()
    )


def check_names(
    report: NetworkReport, answered: Sequence[str], expected: Expected
) -> Iterator[CheckResult]:
    """Check on each node that the names of the others resolve to their private addresses."""
    if not report.links:
        return
    for node in answered:
        wrong = {
            link.target: f"{link.target} is {link.address or 'unknown'}"
            for link in report.links
            if link.source == node and link.address != expected.addresses[link.target]
        }
        if not wrong:
            found = "the names of the other nodes resolve to their private addresses"
            yield CheckResult(node, "names", Verdict.OK, found)
            continue
        found = name_some(list(wrong.values()))
        wanted = name_some([f"{name} is {expected.addresses[name]}" for name in wrong])
        remedy = restore_names(node, expected)
        yield CheckResult(node, "names", Verdict.FAIL, found, wanted, remedy)


def check_ports(
    report: NetworkReport, answered: Sequence[str], expected: Expected
) -> Iterator[CheckResult]:
    """Check that each node accepts connections from the others on an arbitrary port."""
    if not report.links:
        return
    # With a wrong address, the tested port would belong to another machine.
    failed = {
        (link.source, link.target): link.error
        for link in report.links
        if link.error and link.address == expected.addresses[link.target]
    }
    blamed = blame(failed)
    wanted = "all TCP ports are open between the nodes"
    for node in answered:
        if node not in blamed:
            yield CheckResult(node, "ports", Verdict.OK, wanted)
            continue
        look = expected.on_node(node, "sudo iptables -S; sudo nft list ruleset; sudo ufw status")
        remedy = (
            f"Open the security group:\n{expected.command('up')}\n"
            f"Look for a firewall on the node:\n{look}"
        )
        found = describe_failures(node, blamed[node])
        yield CheckResult(node, "ports", Verdict.FAIL, found, wanted, remedy)


def check_ssh_pairs(
    report: NetworkReport, answered: Sequence[str], expected: Expected
) -> Iterator[CheckResult]:
    """Check that each node logs in to the others without a password."""
    if not report.ssh:
        return
    blamed = blame({pair: error for pair, error in report.ssh.items() if error})
    wanted = "passwordless SSH works between all nodes"
    for node in answered:
        if node not in blamed:
            yield CheckResult(node, "ssh pairs", Verdict.OK, wanted)
            continue
        found = describe_failures(node, blamed[node])
        source, target = next(iter(blamed[node]))
        remedy = f"Show the details:\n{expected.on_node(source, f'ssh -v {target} true')}"
        yield CheckResult(node, "ssh pairs", Verdict.FAIL, found, wanted, remedy)


def check_latency(
    report: NetworkReport, answered: Sequence[str], expected: Expected
) -> Iterator[CheckResult]:
    """Check each node's median round trip of a small TCP message to the others."""
    trips = {
        node: [
            link.round_trip_s for link in report.links if link.source == node and link.round_trip_s
        ]
        for node in answered
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
        remedy = f"Find out what else runs:\n{expected.on_node(node, 'top -bn1 | head -15')}"
        if expected.machine:
            remedy = f"Without --no-placement-group, nodes are close to each other. {remedy}"
        yield CheckResult(node, "latency", Verdict.WARN, found, wanted, remedy)


def check_bandwidth(
    report: NetworkReport, answered: Sequence[str], expected: Expected
) -> Iterator[CheckResult]:
    """Check the speed of all nodes sending to the next one at the same time."""
    speeds = [speed for speed in report.gbit.values() if isinstance(speed, float)]
    least = statistics.median(speeds) / _SPEED_FACTOR if speeds else 0.0
    wanted = f"at least {least:.2f} Gbit/s, similar to the other nodes"
    machine = expected.machine
    if machine and machine.gbit and machine.is_metal:
        least = min(machine.gbit * _SPEED_SHARE, _FLOWS_GBIT)
        wanted = f"at least {least:.1f} Gbit/s; {machine.name} has {machine.gbit:g}"
    closed = {(link.source, link.target) for link in report.links if link.error}
    for (node, peer), speed in report.gbit.items():
        if node not in answered:
            continue
        if (node, peer) in closed:
            found = f"not measured: no connection to {peer}"
            yield CheckResult(node, "bandwidth", Verdict.SKIPPED, found)
        else:
            yield _judge_speed(node, peer, speed, (least, wanted), expected)


def _judge_speed(
    node: str, peer: str, speed: float | str, least: tuple[float, str], expected: Expected
) -> CheckResult:
    if not isinstance(speed, float):
        remedy = f"Small messages pass, large ones do not: check the MTU on the path to {peer}"
        return CheckResult(node, "bandwidth", Verdict.FAIL, f"to {peer}: {speed}", least[1], remedy)
    found = f"{speed:.2f} Gbit/s to {peer}"
    if speed >= least[0]:
        return CheckResult(node, "bandwidth", Verdict.OK, found)
    remedy = f"Find out what else uses its network:\n{expected.on_node(node, 'ss -ti | head -30')}"
    return CheckResult(node, "bandwidth", Verdict.WARN, found, least[1], remedy)
