"""Does Slurm answer, and can it start jobs on every node? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster.job_queue import USABLE
from cluster.verify.checks.expected import Expected
from cluster.verify.checks.result import CLUSTER, CheckResult, Verdict
from cluster.verify.queue_probe import QueueNode, QueueReport
from infra.words import counted


def check_queue(report: QueueReport, nodes: Sequence[str], expected: Expected) -> list[CheckResult]:
    """Fail for Slurm as a whole, or for each of the nodes that it does not know or use."""
    if report.error:
        remedy = "Start it again:\n" + expected.on_node(
            "node0", "sudo systemctl restart munge slurmctld; systemctl status slurmctld"
        )
        found = f"Slurm does not answer on the head: {report.error}"
        return [CheckResult(CLUSTER, "queue", Verdict.FAIL, found, "Slurm answers", remedy)]
    known = {node.name: node for node in report.nodes}
    checked = [_check_node(name, known.get(name), expected) for name in nodes]
    if failures := [result for result in checked if result]:
        return failures
    states = Counter(node.state for node in report.nodes)
    each = ", ".join(f"{count} {state}" for state, count in states.items())
    found = f"{counted(len(known), 'node')} in Slurm: {each}"
    return [CheckResult(CLUSTER, "queue", Verdict.OK, found)]


def _check_node(name: str, node: QueueNode | None, expected: Expected) -> CheckResult | None:
    """Return the failure of a node; ``None`` if Slurm can start jobs there."""
    if node is None:
        found = "Slurm does not know it"
        remedy = f"Connect the nodes again:\n{expected.command('repair')}"
    elif node.state in USABLE:
        return None
    else:
        reason = "" if node.reason in ("", "none") else f": {node.reason}"
        found = f"{node.state}{reason}"
        remedy = _remedy(node, expected)
    return CheckResult(name, "queue", Verdict.FAIL, found, "Slurm can start jobs there", remedy)


def _remedy(node: QueueNode, expected: Expected) -> str:
    if node.state.startswith("drain") and node.reason.startswith("disk: "):
        show = expected.on_node(node.name, "df -h ~ /; du -h -d 1 ~/spr-jobs | sort -h")
        return f"Free space there; it then returns to the queue by itself:\n{show}"
    if node.state.startswith("drain") and node.reason.startswith("spot: "):
        return f"Replace the node:\n{expected.command('repair')}"
    if node.state.startswith("drain"):
        resume = f"sudo scontrol update nodename={node.name} state=resume"
        return f"Let it take jobs again:\n{expected.on_node('node0', resume)}"
    # An asterisk marks a node that does not answer.
    start = expected.on_node(node.name, "sudo systemctl restart munge slurmd")
    return f"Start its daemon again, or replace the node:\n{start}\n{expected.command('repair')}"
