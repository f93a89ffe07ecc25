"""Does Slurm on the head answer, and can it start jobs on every node?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cluster.slurm.job_queue import is_usable
from cluster.verify.results import CLUSTER, CheckResult, Expected, Verdict
from infra.words import counted
from provision.host import Host

_DEADLINE_S = 60
# Slurm hears from the nodes within seconds of its start, as at the end of `up`.
_COMMAND = """# asking the queue
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  answer=$(timeout 4 sinfo -h -N -o '%N|%T|%E' 2>&1) && case $answer in *'|unknown'*) ;; *) break ;; esac
  sleep 0.5
done
printf '\n%s\n' "$answer"
"""
# The shell's startup files may print other lines, and text without a newline.
_NODE = re.compile(r"([^|\s]+)\|([^|\s]+)\|(.*)")


class QueueNode(NamedTuple):
    """A node in Slurm's view. ``reason`` is why Slurm does not use it."""

    name: str
    state: str
    reason: str


def _probe(head: Host) -> tuple[list[QueueNode], str]:
    """Ask the head's Slurm for its nodes; return them, and the error if it does not answer."""
    text = head.run(_COMMAND, timeout_s=_DEADLINE_S, check=False).stdout.strip()
    lines = text.splitlines() or ["no answer within 4 s"]
    nodes = [QueueNode(*found.groups()) for line in lines if (found := _NODE.fullmatch(line))]
    return nodes, "" if nodes else lines[-1].removeprefix("slurm_load_partitions: ")


def find_stopped(head: Host, nodes: Sequence[str]) -> list[str]:
    """Return the nodes on which Slurm does not run; all of them if it does not answer."""
    seen, _ = _probe(head)
    # Slurm runs on a drained node, unless an asterisk says that it does not answer.
    running = {n.name for n in seen if is_usable(n.state) or re.fullmatch("drain[^*]*", n.state)}
    return [name for name in nodes if name not in running]


def check_queue(head: Host, nodes: Sequence[str], expected: Expected) -> list[CheckResult]:
    """Fail for Slurm as a whole, or for each node that it does not know or use."""
    seen, error = _probe(head)
    if error:
        remedy = "Start it again:\n" + expected.on_node(
            "node0", "sudo systemctl restart munge slurmctld; systemctl status slurmctld"
        )
        found = f"Slurm does not answer on the head: {error}"
        return [CheckResult(CLUSTER, "queue", Verdict.FAIL, found, "Slurm answers", remedy)]
    known = {node.name: node for node in seen}
    checked = [_check_node(name, known.get(name), expected) for name in nodes]
    if failures := [result for result in checked if result]:
        return failures
    states = Counter(node.state for node in seen)
    each = ", ".join(f"{count} {state}" for state, count in states.items())
    found = f"{counted(len(known), 'node')} in Slurm: {each}"
    return [CheckResult(CLUSTER, "queue", Verdict.OK, found)]


def _check_node(name: str, node: QueueNode | None, expected: Expected) -> CheckResult | None:
    """Return the failure of a node; ``None`` if Slurm can start jobs there."""
    if node is None:
        found = "Slurm does not know it"
        remedy = f"Connect the nodes again:\n{expected.command('repair')}"
    elif is_usable(node.state):
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
    start = expected.on_node(node.name, "sudo systemctl restart munge slurmd")
    return (
        f"Start its daemon again, there or with all others:\n{start}\n{expected.command('repair')}"
    )
