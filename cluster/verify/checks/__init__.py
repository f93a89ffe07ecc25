"""Verdicts on what the nodes say of themselves and of one another. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.nodes import Cluster
from cluster.verify.checks.machine import check_machines
from cluster.verify.checks.reachability import check_speech
from cluster.verify.checks.result import CLUSTER, CheckResult, Expected, Verdict
from cluster.verify.checks.software import check_software
from cluster.verify.node_probe import NodeAnswer
from infra.cloud import Cloud
from infra.instance_types import INSTANCE_TYPES
from infra.spec import ClusterSpec
from provision.install import stack_digest
from provision.stacks import Stack

__all__ = [
    "CLUSTER",
    "CheckResult",
    "Expected",
    "Verdict",
    "check_nodes",
    "expect",
    "judge_hardware",
    "order_results",
    "summarize",
]
_MOST_TOLD = 3


def check_nodes(answers: Sequence[NodeAnswer], expected: Expected) -> tuple[CheckResult, ...]:
    """Everything that can be said of the nodes from their own answers, in the order of the nodes."""
    health = {answer.node: answer.health for answer in answers if answer.health}
    results = [
        *check_speech(answers, expected),
        *check_machines(health, expected),
        *check_software(health, expected),
    ]
    return order_results(results, expected)


def order_results(results: Sequence[CheckResult], expected: Expected) -> tuple[CheckResult, ...]:
    """Check by check, and node by node in each."""
    order = {node: rank for rank, node in enumerate(expected.addresses)}
    checks = {check: rank for rank, check in enumerate(dict.fromkeys(r.check for r in results))}
    return tuple(sorted(results, key=lambda r: (checks[r.check], order.get(r.node, -1))))


def expect(
    cloud: Cloud, cluster: Cluster, wishes: ClusterSpec | Mapping[str, Any], stack: Stack
) -> Expected:
    """What the nodes of a cluster should be, by its wishes: as given now, or as its record has them."""
    known = wishes.model_dump() if isinstance(wishes, ClusterSpec) else wishes
    expected = Expected(
        cluster=cluster.name,
        stack=stack,
        digest=stack_digest(stack),
        amx_required=bool(known.get("amx_required", cloud.has_amx)),
        machine=None,
        volume_gib=int(known.get("volume_gib", 0)),
        instances={node.name: node.instance.id for node in cluster.nodes},
        addresses={node.name: node.private_ip for node in cluster.nodes},
    )
    return judge_hardware(expected, cluster) if cloud.has_amx else expected


def judge_hardware(expected: Expected, cluster: Cluster) -> Expected:
    """The same, with the machines measured by the catalogue's entry of their type."""
    return replace(expected, machine=INSTANCE_TYPES.get(cluster.head.instance.instance_type))


def summarize(results: Sequence[CheckResult], expected: Expected) -> str:
    """What is not as it should be in half a line, and the command that tells more; else nothing."""
    # That AMX is missing where it may be is told already.
    wrong = [r for r in results if r.verdict in (Verdict.FAIL, Verdict.WARN) and r.check != "amx"]
    if not wrong:
        return ""
    wrong.sort(key=lambda result: result.verdict is not Verdict.FAIL)
    told = "; ".join(f"{r.node}: {r.check}: {r.found}" for r in wrong[:_MOST_TOLD])
    more = f"; and {len(wrong) - _MOST_TOLD} more" if len(wrong) > _MOST_TOLD else ""
    return f"; not as it should be: {told}{more} (what to do: {expected.command('verify')})"
