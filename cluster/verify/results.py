"""The definition of a check: it compares a node with expectations and returns a result. Pure.

A check of single nodes is a function in ``machine.py``, ``software.py``, or ``reachability.py``, and a line
in the list of ``verify.py``; see CONTRIBUTING.md.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from cluster.nodes import Cluster, Node
from infra.aws.cloud import Cloud
from infra.instance_types import InstanceType
from infra.lifetime import Lifetime
from infra.spec import ClusterSpec
from provision.facts import NodeHealth
from provision.install import stack_digest
from provision.run_on_nodes import Answer
from provision.stacks.stack import Stack
from provision.user_data import EXPRESS_MTU

T = TypeVar("T", bound=Hashable)
CLUSTER = "cluster"
"""Stands for a node's name in results that concern the whole cluster."""
_MAX_NAMED = 4


class Verdict(str, Enum):
    """Outcome of a check. ``SKIPPED``: not checked, or the machine does not expose the value."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckResult:
    """One check of one node. ``remedy`` says how to fix a warning or failure: text or commands, by line."""

    node: str
    check: str
    verdict: Verdict
    found: str
    wanted: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        return {**asdict(self), "verdict": self.verdict.value}


def worst(results: Iterable[CheckResult]) -> Verdict:
    """Return the worst verdict; skipped checks do not count."""
    found = {result.verdict for result in results}
    return next(v for v in (Verdict.FAIL, Verdict.WARN, Verdict.OK) if v in found)


def typical(values: Iterable[T]) -> T:
    """Return the most frequent value; on a tie, the head's, which comes first."""
    return Counter(values).most_common(1)[0][0]


def name_some(names: Sequence[str]) -> str:
    """Join the names; of many, only the first few."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/network_mtu.html: inside a VPC.
AWS_MTU = 9001


@dataclass(frozen=True)
class Expected:
    """Expected state of a cluster's nodes.

    ``machine`` describes the instance type. It is ``None`` for the embedded
    cloud, whose containers are only compared with each other.
    """

    cluster: str
    stack: Stack
    digest: str
    """Digest of the stack, as the installer records it on a node."""
    amx_required: bool
    machine: InstanceType | None
    volume_gib: int = 0
    instances: Mapping[str, str] = field(default_factory=dict)
    """EC2 instance IDs by node."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Private addresses by node, in rank order."""
    lifetimes: Mapping[str, Lifetime] = field(default_factory=dict)
    """When the nodes shut down, by their tags; without a node whose tag is missing or unreadable."""
    mtu: int = 0
    """Of the machine's network; 0 for the embedded cloud."""
    region: str = ""
    place: str = ""
    """As :attr:`.Cluster.place`."""
    peers: Mapping[str, NodeHealth] = field(default_factory=dict)
    """All nodes' health, with which each node is compared."""
    clocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds by which each node's clock is ahead of the head's, and the error of that value."""
    connected: bool = True
    """Whether all nodes run and know each other. If not, the head's failed logins prove no fault."""

    def usual(self, value: Callable[[NodeHealth], T | None]) -> T | None:
        """Return the most frequent value of all nodes, ignoring those without one."""
        found = [each for peer in self.peers.values() if (each := value(peer)) is not None]
        return typical(found) if found else None

    def command(self, verb: str) -> str:
        """Return a command of this tool for this cluster."""
        return f"spr-cluster {verb} --name {self.cluster}{self.place}"

    def on_node(self, node: str, script: str) -> str:
        """Return a command that runs a script on a node."""
        return f"{self.command('ssh')} {node} -- {shlex.quote(script)}"

    def replacement(self, node: str, reason: str) -> str:
        """Return the remedy for a working node that must be replaced: the reason, then commands."""
        if self.machine is None:
            return f"{reason}. Recreate the cluster:\n{self.command('down')}\n{self.command('up')}"
        instance = self.instances.get(node, "ID")
        end = f"aws ec2 terminate-instances --region {self.region} --instance-ids {instance}"
        return f"{reason}. Replace the node:\n{end}\n{self.command('repair')}"


def expect(
    cloud: Cloud,
    cluster: Cluster,
    spec: ClusterSpec | Mapping[str, Any],
    stack: Stack,
    machine: InstanceType | None,
) -> Expected:
    """Return the expected state, from the current spec or from the one that the cluster recorded."""
    known = spec.model_dump() if isinstance(spec, ClusterSpec) else spec
    expected = Expected(
        cluster=cluster.name,
        stack=stack,
        digest=stack_digest(stack),
        amx_required=bool(known.get("amx_required", cloud.has_amx)),
        machine=None,
        volume_gib=int(known.get("volume_gib", 0)),
        instances={node.name: node.instance.id for node in cluster.nodes},
        addresses={node.name: node.private_ip for node in cluster.nodes},
        lifetimes={
            node.name: life for node in cluster.nodes if (life := _lifetime_of(node, known))
        },
        region=cloud.region,
        place=cluster.place,
    )
    return with_hardware(expected, cluster, machine) if cloud.has_amx else expected


def _lifetime_of(node: Node, known: Mapping[str, Any]) -> Lifetime | None:
    try:
        expires, latest = node.instance.expires, node.instance.latest
    except ValueError:
        return None
    grace, idle = (known.get(key) or timedelta() for key in ("grace", "idle_timeout"))
    return Lifetime(expires, latest, grace, idle) if expires and latest else None


def with_hardware(expected: Expected, cluster: Cluster, machine: InstanceType | None) -> Expected:
    """Return the expected state with the hardware of the cluster's instance type."""
    # One node with ENA Express lowers the MTU of all.
    express = any(node.instance.ena_express for node in cluster.nodes)
    return replace(expected, machine=machine, mtu=EXPRESS_MTU if express else AWS_MTU)


NodeAnswer = Answer[NodeHealth]
NodeCheck = Callable[[str, NodeHealth, Expected], CheckResult]
"""A check of a node, by its name and its own answer."""


@dataclass(frozen=True)
class CommandCheck:
    """A check of what a shell command prints on a node; "" if the command fails."""

    command: str
    judge: Callable[[str, str, Expected], CheckResult]

    def __call__(self, node: str, health: NodeHealth, expected: Expected) -> CheckResult:
        return self.judge(node, health.said[self.command], expected)


def asks(command: str) -> Callable[[Callable[[str, str, Expected], CheckResult]], CommandCheck]:
    """Turn a function that judges a command's output into a check; the nodes run the command."""
    return partial(CommandCheck, command)
