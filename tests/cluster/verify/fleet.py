"""Answers of three healthy nodes, and changes to them, for the tests of the checks."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from cluster.verify.results import CheckResult, Expected, NodeAnswer
from cluster.verify.verify import check_nodes
from infra.instance_types import INSTANCE_TYPES
from infra.lifetime import Lifetime
from provision.facts import parse_health
from provision.install import stack_digest
from provision.stacks.load import load_stack
from tests.fakes import EXPIRES, health_answer

STACK = load_stack("intel")
NODES = ("node0", "node1", "node2")
_END = datetime.fromtimestamp(EXPIRES, timezone.utc)
ON_AWS = Expected(
    cluster="bert",
    stack=STACK,
    digest=stack_digest(STACK),
    amx_required=True,
    machine=INSTANCE_TYPES["r7iz.metal-16xl"],
    volume_gib=100,
    region="us-east-1",
    mtu=9001,
    instances={name: f"i-{rank}" for rank, name in enumerate(NODES)},
    addresses={name: f"172.31.0.{10 + rank}" for rank, name in enumerate(NODES)},
    lifetimes=dict.fromkeys(NODES, Lifetime(_END, _END, timedelta())),
)
IN_CONTAINERS = replace(ON_AWS, machine=None, mtu=0, amx_required=False)


def answer(node: str, **parts: Any) -> NodeAnswer:
    """A healthy node's answer, with ``parts`` of it changed."""
    health = health_answer(STACK, address=ON_AWS.addresses[node], **parts)
    return NodeAnswer(node, True, parse_health(json.dumps(health)))


def answers(*nodes: str, **changes: Any) -> dict[str, NodeAnswer]:
    """The answers of all nodes, or of these, with parts of some changed."""
    return {node: answer(node, **changes.get(node, {})) for node in nodes or NODES}


def judge(expected: Expected = ON_AWS, **changes: Any) -> tuple[CheckResult, ...]:
    """All results; ``changes`` are parts of the nodes' answers by node."""
    return check_nodes(answers(**changes), expected, dict.fromkeys(NODES, (0.0, 0.0)))


def verdicts_of(results: tuple[CheckResult, ...], *verdicts: str) -> list[tuple[str, str, str]]:
    """Node, check and verdict of the results that have one of these verdicts."""
    shown = verdicts or ("warn", "fail")
    return [(r.node, r.check, r.verdict.value) for r in results if r.verdict.value in shown]


def one(results: tuple[CheckResult, ...], node: str, check: str) -> CheckResult:
    """The only result of a check on a node."""
    (result,) = [r for r in results if (r.node, r.check) == (node, check)]
    return result
