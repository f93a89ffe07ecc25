"""Nodes as they describe themselves, for the tables of the checks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from cluster.verify.checks import CheckResult, Expected, check_nodes
from cluster.verify.node_probe import NodeAnswer
from infra.instance_types import find_instance_type
from provision.health import parse_health
from provision.install import stack_digest
from provision.stacks import load_stack
from tests.fakes import health_answer

STACK = load_stack("intel")
NODES = ("node0", "node1", "node2")
ON_AWS = Expected(
    cluster="bert",
    stack=STACK,
    digest=stack_digest(STACK),
    amx_required=True,
    machine=find_instance_type("r7iz.metal-16xl"),
    volume_gib=100,
    instances={name: f"i-{rank}" for rank, name in enumerate(NODES)},
    addresses={name: f"172.31.0.{10 + rank}" for rank, name in enumerate(NODES)},
)
IN_CONTAINERS = replace(ON_AWS, machine=None, amx_required=False)


def answer(node: str, **parts: Any) -> NodeAnswer:
    """A good node, less what ``parts`` change of it."""
    told = health_answer(STACK, address=ON_AWS.addresses[node], **parts)
    return NodeAnswer(node, True, parse_health(json.dumps(told)))


def judge(expected: Expected = ON_AWS, **lies: Any) -> tuple[CheckResult, ...]:
    """All results; ``lies`` are parts of the nodes' answers by node."""
    answers = [answer(node, **lies.get(node, {})) for node in NODES]
    return check_nodes(answers, expected)


def told(results: tuple[CheckResult, ...], *verdicts: str) -> list[tuple[str, str, str]]:
    """Node, check and verdict of the results that have one of these verdicts."""
    wanted = verdicts or ("warn", "fail")
    return [(r.node, r.check, r.verdict.value) for r in results if r.verdict.value in wanted]


def one(results: tuple[CheckResult, ...], node: str, check: str) -> CheckResult:
    """The one result of a check on a node."""
    (result,) = [r for r in results if (r.node, r.check) == (node, check)]
    return result
