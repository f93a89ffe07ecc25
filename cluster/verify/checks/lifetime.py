"""Does each node shut itself down in time? Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from cluster.verify.checks.expected import Expected
from cluster.verify.checks.result import CheckResult, Verdict
from cluster.verify.node_probe import HealthByNode
from provision.health import NodeHealth


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
