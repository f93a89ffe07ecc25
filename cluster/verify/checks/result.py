"""A check's verdict, and what the nodes are measured by. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from infra.instance_types import InstanceType
from provision.stacks import Stack

T = TypeVar("T", bound=Hashable)
CLUSTER = "cluster"
"""In the place of a node's name: what is true of all of them together."""


class Verdict(str, Enum):
    """How a check ended. ``UNKNOWN`` is what was not judged, or can't be known there."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CheckResult:
    """One check of one node. ``remedy`` is what to do about a warning or a failure."""

    node: str
    check: str
    verdict: Verdict
    found: str
    wanted: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The result for ``--json``."""
        return {
            "node": self.node,
            "check": self.check,
            "verdict": self.verdict.value,
            "found": self.found,
            "wanted": self.wanted,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Expected:
    """What the nodes should be.

    ``machine`` is the catalogue's entry of their type, ``None`` where the machines are not judged by
    it: the containers of the embedded cloud are compared with one another only.
    """

    cluster: str
    stack: Stack
    digest: str
    """Of the stack, as an installation leaves it on a node."""
    amx_required: bool
    machine: InstanceType | None
    volume_gib: int = 0
    instances: Mapping[str, str] = field(default_factory=dict)
    """EC2's ids by node."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Private addresses by node."""

    def command(self, verb: str) -> str:
        """One of our commands for this cluster, as a user types it."""
        return f"spr-cluster {verb} --name {self.cluster}"

    def on_node(self, node: str, script: str) -> str:
        """A command for a node."""
        return f"{self.command('ssh')} {node} -- {shlex.quote(script)}"

    def replacement(self, node: str) -> str:
        """How a node is replaced that works, but is not what it should be."""
        if self.machine is None:
            return f"begin anew: {self.command('down')}, then {self.command('up')}"
        instance = self.instances.get(node, "ID")
        end = f"aws ec2 terminate-instances --instance-ids {instance}"
        return f"have it replaced: {end}, then {self.command('repair')}"


def typical(values: Iterable[T]) -> T:
    """The most frequent value; the first of them, which is the head's, where several are."""
    return Counter(values).most_common(1)[0][0]


def count(number: int, noun: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
