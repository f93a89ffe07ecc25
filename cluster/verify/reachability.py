"""Does the head reach each node over SSH, with the right name, address, MTU, and time? Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from cluster.verify.results import CheckResult, Expected, HealthByNode, NodeAnswer, Verdict, typical
from provision.facts import NodeHealth
from provision.user_data import EXPRESS_MTU

# File times, logs, and automatic shutdown depend on the clock; chrony on AWS keeps it within milliseconds.
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 5.0
FIX_CLOCK = "sudo systemctl restart chrony; timedatectl"


def check_reachability(answers: Sequence[NodeAnswer], expected: Expected) -> Iterator[CheckResult]:
    """Check SSH from the head to each node, and each node's name, MTU, and clock."""
    answered = {answer.node: answer for answer in answers}
    for node in expected.addresses:
        yield check_ssh(node, answered.get(node), expected)
    by_node = {answer.node: answer.health for answer in answers if answer.health}
    for node, health in by_node.items():
        yield check_hostname(node, health, expected)
    yield from check_mtu(by_node, expected)
    known = {a.node: (a.clock_s, a.clock_error_s) for a in answers if a.reached and a.health}
    yield from check_clocks(known, expected)


def check_ssh(node: str, answer: NodeAnswer | None, expected: Expected) -> CheckResult:
    """Check that the head logs in without a password and that Python runs on the node."""
    wanted = "the head logs in without a password"
    if answer is None:
        found, remedy = "not in the head's list of nodes", f"Add it:\n{expected.command('up')}"
        return CheckResult(node, "ssh", Verdict.FAIL, found, wanted, remedy)
    if not answer.problem:
        return CheckResult(node, "ssh", Verdict.OK, wanted)
    remedy = f"Replace the node:\n{expected.command('repair')}"
    return CheckResult(node, "ssh", Verdict.FAIL, answer.problem, wanted, remedy)


def check_hostname(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that the hostname resolves to the private address, to which peers connect."""
    wanted = expected.addresses[node]
    addresses = ", ".join(health.own_addresses) or "no address"
    found = f"{health.hostname} is {addresses}"
    if health.own_addresses == (wanted,):
        return CheckResult(node, "hostname", Verdict.OK, found)
    verdict = Verdict.WARN if wanted in health.own_addresses else Verdict.FAIL
    remedy = restore_names(node, expected)
    return CheckResult(node, "hostname", verdict, found, f"{health.hostname} is {wanted}", remedy)


def restore_names(node: str, expected: Expected) -> str:
    """Return the command that copies the cluster's /etc/hosts entries from another node to this one."""
    other = "node1" if node == "node0" else "node0"
    block = 'sed -n "/^# spr-cluster begin/,/^# spr-cluster end/p" /etc/hosts'
    put = '"cat - /etc/hosts > /tmp/hosts; sudo cp --no-preserve=all /tmp/hosts /etc/hosts"'
    return expected.on_node(other, f"{block} | ssh {node} {put}")


def check_mtu(by_node: HealthByNode, expected: Expected) -> Iterator[CheckResult]:
    """Check that all nodes have the same MTU, and on AWS the one of its networks or of ENA Express."""
    mtus = {n: health.mtus.get(expected.addresses[n]) for n, health in by_node.items()}
    known = [mtu for mtu in mtus.values() if mtu]
    for node, mtu in mtus.items():
        address = expected.addresses[node]
        if mtu is None:
            found, wanted = f"no interface has {address}", f"an interface with {address}"
            remedy = expected.on_node(node, "ip address")
            yield CheckResult(node, "mtu", Verdict.FAIL, found, wanted, remedy)
            continue
        name = by_node[node].interfaces[address]
        found, verdict, wanted, remedy = f"{name}: {mtu}", Verdict.OK, "", ""
        usual = expected.mtu or typical(known)
        if mtu != usual:
            # A node with a smaller MTU than its peers loses their packets or slows them down.
            verdict = Verdict.FAIL if len(set(known)) > 1 else Verdict.WARN
            network = "ENA Express" if usual == EXPRESS_MTU else "AWS networks"
            wanted = f"{usual}, the MTU of {network}" if expected.mtu else f"{usual}"
            remedy = expected.on_node(node, f"sudo ip link set {name} mtu {usual}")
        yield CheckResult(node, "mtu", verdict, found, wanted, remedy)


def check_clocks(
    clocks: Mapping[str, tuple[float, float]], expected: Expected
) -> Iterator[CheckResult]:
    """Check that the clocks agree. ``clocks``: seconds ahead of the head, and the error of that."""
    if not clocks:
        return
    # If only the head is wrong, all others differ from it. Two nodes have no majority.
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
            remedy = expected.on_node(node, FIX_CLOCK)
        direction = "ahead of" if ahead >= 0 else "behind"
        found = f"{_format_seconds(abs(ahead))} (± {_format_seconds(error)}) {direction} the other nodes"
        if verdict is Verdict.OK:
            found = f"same as the other nodes (± {_format_seconds(max(error, abs(ahead)))})"
        yield CheckResult(node, "clock", verdict, found, wanted, remedy)


def _format_seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def check_lifetimes(by_node: HealthByNode, expected: Expected) -> Iterator[CheckResult]:
    """Check the timer of every node."""
    for node, health in by_node.items():
        yield check_lifetime(node, health, expected)


def check_lifetime(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that the timer that shuts a node down runs, and has the time in the node's tag."""
    check, tagged = "time to live", expected.expires.get(node)
    wanted = _describe(tagged) if tagged else "a timer that shuts it down"
    remedy = f"Set it again, on all nodes:\n{expected.command('extend 1m')}"
    if health.expires is None:
        found = "the timer that shuts it down does not run"
        return CheckResult(node, check, Verdict.FAIL, found, wanted, remedy)
    found = _describe(datetime.fromtimestamp(health.expires, timezone.utc))
    if tagged and health.expires != int(tagged.timestamp()):
        return CheckResult(node, check, Verdict.FAIL, found, wanted, remedy)
    return CheckResult(node, check, Verdict.OK, found)


def _describe(expires: datetime) -> str:
    return f"shuts down at {expires:%Y-%m-%d %H:%M:%S} UTC"
