"""A cluster as its nodes: ``node0`` is the head, ``node1``… are the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra import tags
from infra.errors import UsageError
from infra.instances import HEAD, Instance, describe_instances
from provision.host import Host

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client


@dataclass(frozen=True)
class Node:
    """A machine with its place in the cluster."""

    rank: int
    instance: Instance

    @property
    def name(self) -> str:
        return f"node{self.rank}"

    @property
    def private_ip(self) -> str:
        return self.instance.private_ip

    @property
    def public_ip(self) -> str:
        return self.instance.public_ip

    def as_dict(self) -> dict[str, str]:
        """The node for ``--json``."""
        return {
            "name": self.name,
            "instance": self.instance.id,
            "type": self.instance.instance_type,
            "zone": self.instance.zone,
            "state": self.instance.state,
            "private_ip": self.private_ip,
            "public_ip": self.public_ip,
        }


HostOpener = Callable[[Node], Host]


@dataclass(frozen=True)
class Cluster:
    """The nodes of a cluster in the order of their ranks, head first."""

    name: str
    nodes: tuple[Node, ...]

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def workers(self) -> tuple[Node, ...]:
        return self.nodes[1:]

    @property
    def stack(self) -> str:
        return self.head.instance.tags.get(tags.STACK, "")

    def node(self, wish: str) -> Node:
        """A node by its name (``node2``) or rank (``2``); raises :class:`UsageError` otherwise."""
        for node in self.nodes:
            if wish in (node.name, str(node.rank)):
                return node
        raise UsageError(f"no {wish!r} in cluster {self.name}: node0 to node{len(self.nodes) - 1}")


def rank_nodes(instances: tuple[Instance, ...]) -> tuple[Node, ...]:
    """Ranks by role, then launch: the head is 0, workers follow in EC2's launch order."""
    ordered = sorted(instances, key=lambda i: (i.role != HEAD, i.launch_time, i.launch_index, i.id))
    return tuple(Node(rank, instance) for rank, instance in enumerate(ordered))


def find_cluster(ec2: EC2Client, name: str) -> Cluster:
    """The running cluster of that name, from its tags alone.

    Raises :class:`UsageError` where there is none, or no head in it.
    """
    nodes = rank_nodes(describe_instances(ec2, tags.cluster_filter(name), ["running"]))
    if not nodes:
        raise UsageError(
            f"no cluster {name!r} is running in {ec2.meta.region_name}",
            hint="`spr-cluster up` makes one; --name, --cloud and --region say where to look",
        )
    if nodes[0].instance.role != HEAD:
        raise UsageError(
            f"cluster {name!r} has no running head node",
            hint=f"`spr-cluster down --name {name}` removes what is left of it",
        )
    return Cluster(name, nodes)
