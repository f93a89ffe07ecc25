"""Does the head reach each node, with the right name, address, MTU, time, and time to live? Pure."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Container, Mapping

from cluster.nodes import Cluster
from cluster.ssh_mesh import PUT_NAMES
from cluster.verify.results import CheckResult, Expected, NodeAnswer, Verdict, asks, typical
from infra.lifetime import Lifetime
from provision.facts import NodeHealth
from provision.user_data import EXPRESS_MTU, SHOW_EXPIRY

# File times, logs, and automatic shutdown depend on the clock; chrony on AWS keeps it within milliseconds.
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 5.0
FIX_CLOCK = "sudo systemctl restart chrony; timedatectl"


def find_unusable(
    cluster: Cluster,
    answers: Mapping[str, NodeAnswer],
    earlier: Container[str],
    *,
    amx_required: bool,
) -> dict[str, str]:
    """Return the nodes to replace, with the reason; empty for a healthy cluster.

    An ``earlier`` instance that answers over SSH, but whose probe failed, may run jobs: the ``ssh`` check
    reports it.
    """
    reasons = {}
    for node in cluster.nodes:
        answer = answers.get(node.name)
        if answer is None:
            reasons[node.name] = "the head got no answer"
        elif answer.problem and not (answer.reached and node.instance.id in earlier):
            reasons[node.name] = answer.problem
        elif answer.value and answer.value.missing_amx and amx_required:
            reasons[node.name] = f"no AMX: lacks {', '.join(answer.value.missing_amx)}"
    return reasons


def check_ssh(node: str, answer: NodeAnswer | None, expected: Expected) -> CheckResult:
    """Check that the head logs in without a password and that Python runs on the node."""
    wanted = "the head logs in without a password"
    if answer is None:
        found, remedy = "not in the head's list of nodes", f"Add it:\n{expected.command('up')}"
        return CheckResult(node, "ssh", Verdict.FAIL, found, wanted, remedy)
    if not answer.problem:
        return CheckResult(node, "ssh", Verdict.OK, wanted)
    if answer.value and not expected.connected:
        found = "not tested: the nodes are not all connected; this machine can log in"
        return CheckResult(node, "ssh", Verdict.SKIPPED, found)
    remedy = f"Replace the node:\n{expected.command('repair')}"
    if answer.reached:
        look = expected.on_node(node, "df -h; python3 -V")
        reason = "If they can't be fixed, or `verify` fails again, the machine may be faulty"
        remedy = f"Look at its disks and its Python:\n{look}\n{expected.replacement(node, reason)}"
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
    return expected.on_node(other, f"{block} | ssh {node} {shlex.quote(PUT_NAMES)}")


def check_mtu(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that all nodes have the same MTU, and on AWS the one of its networks or of ENA Express."""
    address = expected.addresses[node]
    mtu = health.mtus.get(address)
    if mtu is None:
        found, wanted = f"no interface has {address}", f"an interface with {address}"
        remedy = expected.on_node(node, "ip address")
        return CheckResult(node, "mtu", Verdict.FAIL, found, wanted, remedy)
    known = [m for n, peer in expected.peers.items() if (m := peer.mtus.get(expected.addresses[n]))]
    name, usual = health.interfaces[address], expected.mtu or typical(known)
    found = f"{name}: {mtu}"
    if mtu == usual:
        return CheckResult(node, "mtu", Verdict.OK, found)
    # A node with a smaller MTU than its peers loses their packets or slows them down.
    verdict = Verdict.FAIL if len(set(known)) > 1 else Verdict.WARN
    network = "ENA Express" if usual == EXPRESS_MTU else "AWS networks"
    wanted = f"{usual}, the MTU of {network}" if expected.mtu else f"{usual}"
    remedy = expected.on_node(node, f"sudo ip link set {name} mtu {usual}")
    return CheckResult(node, "mtu", verdict, found, wanted, remedy)


def compare_clocks(answers: Mapping[str, NodeAnswer]) -> dict[str, tuple[float, float]]:
    """Return each clock's lead over the head's, with its error: half the round trip."""
    return {
        node: (
            answer.value.time - (answer.began + answer.ended) / 2,
            (answer.ended - answer.began) / 2,
        )
        for node, answer in answers.items()
        if answer.reached and answer.value
    }


def check_clock(node: str, _: NodeHealth, expected: Expected) -> CheckResult:
    """Check that the node's clock agrees with the others, as far as the measurement proves."""
    if node not in expected.clocks:
        return CheckResult(node, "clock", Verdict.SKIPPED, "the head can't compare it")
    measured, error = expected.clocks[node]
    # If only the head is wrong, all others differ from it. Two nodes have no majority.
    leads = [lead for lead, _ in expected.clocks.values()]
    ahead = measured - (statistics.median_low(leads) if len(leads) > 2 else 0)
    proven = max(abs(ahead) - error, 0.0)
    if proven <= _CLOCK_WARN_S:
        found = f"same as the other nodes (± {_format_seconds(max(error, abs(ahead)))})"
        return CheckResult(node, "clock", Verdict.OK, found)
    verdict = Verdict.FAIL if proven > _CLOCK_FAIL_S else Verdict.WARN
    direction = "ahead of" if ahead >= 0 else "behind"
    found = (
        f"{_format_seconds(abs(ahead))} (± {_format_seconds(error)}) {direction} the other nodes"
    )
    wanted = f"within {_CLOCK_WARN_S} s of the other nodes"
    return CheckResult(node, "clock", verdict, found, wanted, expected.on_node(node, FIX_CLOCK))


def _format_seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


@asks(SHOW_EXPIRY)
def check_lifetime(node: str, printed: str, expected: Expected) -> CheckResult:
    """Check that the timer that shuts a node down runs, and has the times in the node's tags."""
    check, tagged = "time to live", expected.lifetimes.get(node)
    wanted = f"shuts down at {tagged}" if tagged else "a timer that shuts it down"
    remedy = f"Set it again, on all nodes:\n{expected.command('extend 1m')}"
    in_force = Lifetime.parse(printed)
    if in_force is None:
        found = "the timer that shuts it down does not run"
        return CheckResult(node, check, Verdict.FAIL, found, wanted, remedy)
    found = f"shuts down at {in_force}"
    if tagged and in_force.seconds != tagged.seconds:
        return CheckResult(node, check, Verdict.FAIL, found, wanted, remedy)
    return CheckResult(node, check, Verdict.OK, found)
