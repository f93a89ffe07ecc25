"""Does each node answer the head, by the right name, from the right address, at the right time? Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from cluster.verify.checks.result import CheckResult, Expected, Verdict, typical
from cluster.verify.node_probe import NodeAnswer
from provision.health import NodeHealth

# Files' times, logs and the clusters' own end go by the clock; chrony keeps AWS's within milliseconds.
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 5.0
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/network_mtu.html: inside a VPC.
_JUMBO = 9001


def check_speech(answers: Sequence[NodeAnswer], expected: Expected) -> Iterator[CheckResult]:
    """The way from the head to each node, and what its network says of itself."""
    heard = {answer.node: answer for answer in answers}
    for node in expected.addresses:
        yield check_ssh(node, heard.get(node), expected)
    health = {answer.node: answer.health for answer in answers if answer.health}
    for node, told in health.items():
        yield check_hostname(node, told, expected)
    yield from check_mtu(health, expected)
    known = {a.node: (a.clock_s, a.clock_error_s) for a in answers if a.reached and a.health}
    yield from check_clocks(known, expected)


def check_ssh(node: str, answer: NodeAnswer | None, expected: Expected) -> CheckResult:
    """The head enters the node by its name without a password, and Python runs there."""
    if answer and answer.reached and answer.health:
        return CheckResult(node, "ssh", Verdict.OK, "the head enters it without a password")
    wanted = "the head enters it without a password"
    remedy = f"{expected.command('repair')} replaces nodes that do not answer"
    if answer and answer.reached:
        found = f"it can't be asked what it is: {answer.reason}"
        return CheckResult(node, "ssh", Verdict.FAIL, found, "an answer", remedy)
    reason = answer.reason if answer else "the head's list of nodes lacks it"
    if answer is None:
        remedy = f"{expected.command('up')} connects it"
    return CheckResult(node, "ssh", Verdict.FAIL, f"the head can't: {reason}", wanted, remedy)


def check_hostname(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """Its own name leads to its private address, which its peers are told to connect to."""
    wanted = expected.addresses[node]
    addresses = ", ".join(told.own_addresses) or "no address"
    found = f"{told.hostname} is {addresses}"
    if told.own_addresses == (wanted,):
        return CheckResult(node, "hostname", Verdict.OK, found)
    verdict = Verdict.WARN if wanted in told.own_addresses else Verdict.FAIL
    remedy = mend_names(node, expected)
    return CheckResult(node, "hostname", verdict, found, f"{told.hostname} is {wanted}", remedy)


def mend_names(node: str, expected: Expected) -> str:
    """How a node gets the cluster's names again: first in its /etc/hosts, from another node's."""
    other = "node1" if node == "node0" else "node0"
    block = 'sed -n "/^# spr-cluster begin/,/^# spr-cluster end/p" /etc/hosts'
    put = '"cat - /etc/hosts > /tmp/hosts; sudo cp --no-preserve=all /tmp/hosts /etc/hosts"'
    return expected.on_node(other, f"{block} | ssh {node} {put}")


def check_mtu(health: Mapping[str, NodeHealth], expected: Expected) -> Iterator[CheckResult]:
    """The largest packet of the cluster's network is the same everywhere, and jumbo on AWS."""
    links = {n: told.interfaces.get(expected.addresses[n]) for n, told in health.items()}
    known = [link[1] for link in links.values() if link]
    for node, link in links.items():
        address = expected.addresses[node]
        if link is None:
            found, remedy = f"no interface has {address}", expected.on_node(node, "ip address")
            yield CheckResult(
                node, "mtu", Verdict.FAIL, found, f"an interface with {address}", remedy
            )
            continue
        name, mtu = link
        found, verdict, wanted, remedy = f"{name}: {mtu}", Verdict.OK, "", ""
        usual = max(typical(known), _JUMBO) if expected.machine else typical(known)
        if mtu != usual:
            # Smaller than its peers' it loses what they send, or slows it down.
            verdict = Verdict.FAIL if len(set(known)) > 1 else Verdict.WARN
            wanted = f"{usual}, as AWS's network has it" if expected.machine else f"{usual}"
            remedy = expected.on_node(node, f"sudo ip link set {name} mtu {usual}")
        yield CheckResult(node, "mtu", verdict, found, wanted, remedy)


def check_clocks(
    clocks: Mapping[str, tuple[float, float]], expected: Expected
) -> Iterator[CheckResult]:
    """The nodes have one time. ``clocks``: seconds ahead of the head, and how wrong that can be."""
    if not clocks:
        return
    # Where the head alone is wrong, all the others seem to be; of two nodes nobody can tell.
    middle = (
        statistics.median_low([ahead for ahead, _ in clocks.values()]) if len(clocks) > 2 else 0
    )
    for node, (measured, error) in clocks.items():
        ahead = measured - middle
        proven = max(abs(ahead) - error, 0.0)
        verdict, wanted, remedy = Verdict.OK, "", ""
        if proven > _CLOCK_WARN_S:
            verdict = Verdict.FAIL if proven > _CLOCK_FAIL_S else Verdict.WARN
            wanted = f"within {_CLOCK_WARN_S} s of the other nodes"
            remedy = expected.on_node(node, "sudo systemctl restart chrony; timedatectl")
        word = "ahead of" if ahead >= 0 else "behind"
        found = f"{_seconds(abs(ahead))} (± {_seconds(error)}) {word} the other nodes"
        if verdict is Verdict.OK:
            found = f"the other nodes' (± {_seconds(max(error, abs(ahead)))})"
        yield CheckResult(node, "clock", verdict, found, wanted, remedy)


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
