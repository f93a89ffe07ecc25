"""Nodes of a cluster: ``node0`` is the head; ``node1``, ``node2``, … are the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cluster.local_files import nearest_cluster, place_options
from infra.aws.cloud import Cloud
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord
from infra.ec2.instances import HEAD, Instance
from infra.ec2.inventory import describe_inventory
from infra.errors import NoClusterError, SprError, UsageError
from infra.plan.planner import is_connected, number_instances
from infra.spec import ClusterOptions
from infra.words import counted, spoken_day
from provision.host import Host
from provision.install import proxy_environment

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client


@dataclass(frozen=True)
class Node:
    """A machine with its rank in the cluster."""

    rank: int
    instance: Instance
    jump: str = ""
    """How to reach it from outside its network: see ``ClusterSpec.jump``."""

    @property
    def name(self) -> str:
        return f"node{self.rank}"

    @property
    def private_ip(self) -> str:
        return self.instance.private_ip

    @property
    def public_ip(self) -> str:
        return self.instance.public_ip

    @property
    def is_public(self) -> bool:
        """Whether this machine connects to its public address."""
        return bool(self.public_ip) and not self.jump

    @property
    def address(self) -> str:
        """The address that SSH connects to."""
        return self.public_ip if self.is_public else self.private_ip

    def as_dict(self) -> dict[str, str]:
        """Return the node for ``--json``."""
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
    wanted_nodes: int
    place: str = ""
    """``--cloud`` and ``--region`` for commands in messages; "" if this machine knows them."""
    expires: datetime | None = None
    """When its nodes shut down."""
    bucket: str = ""
    """The S3 URL below which its nodes may write; "" for none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for what its nodes install and run, such as the proxy's."""
    options: Mapping[str, Any] = field(default_factory=lambda: ClusterOptions().model_dump())
    """The recorded options of `up`."""
    created: datetime | None = None
    job_ends: datetime | None = None
    """When they shut down at the latest while a job with a limit runs."""

    @property
    def flags(self) -> str:
        """The options that name this cluster, for commands in messages."""
        return f"--name {self.name}{self.place}"

    @property
    def is_whole(self) -> bool:
        """Whether all requested nodes are running and connected."""
        instances = [node.instance for node in self.nodes]
        return len(instances) == self.wanted_nodes and is_connected(instances)

    def require_connected(self) -> None:
        """Raise :class:`SprError` if `up` has never connected the nodes."""
        instances = [node.instance for node in self.nodes]
        if is_unconnected(instances, self.wanted_nodes):
            raise _not_complete(self.name, self.flags)

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def workers(self) -> tuple[Node, ...]:
        return self.nodes[1:]

    @property
    def stack(self) -> str:
        return self.head.instance.tags.get(tags.STACK, "")

    def first(self, count: int | None) -> Cluster:
        """Return a smaller cluster of the first nodes; ``None`` means all of them.

        Raises :class:`UsageError` if the cluster has fewer nodes.
        """
        if count is None or count == len(self.nodes):
            return self
        if not 1 <= count <= len(self.nodes):
            raise UsageError(
                f"--nodes {count}: cluster {self.name} has {counted(len(self.nodes), 'node')}",
                hint=f"use --nodes 1 to {len(self.nodes)}, or grow the cluster: "
                f"`spr-cluster up --nodes {count} {self.flags}`",
            )
        return replace(self, nodes=self.nodes[:count], wanted_nodes=count)

    def node(self, name_or_rank: str) -> Node:
        """Return a node by its name (``node2``) or rank (``2``). Raises :class:`UsageError`."""
        for node in self.nodes:
            if name_or_rank in (node.name, str(node.rank)):
                return node
        names, last = [node.name for node in self.nodes], self.nodes[-1].rank
        if 0 < last == len(names) - 1:
            names = [f"node0 to node{last}"]
        raise UsageError(f"no {name_or_rank!r} in cluster {self.name!r}: it has {', '.join(names)}")


def rank_nodes(
    instances: Iterable[Instance], wanted: int, jump: str | None = None
) -> tuple[Node, ...]:
    """Rank the nodes of a cluster of ``wanted`` nodes: the head is 0; the others keep their ranks."""
    ranked = number_instances(instances, wanted).items()
    return tuple(Node(rank, instance, jump or "") for rank, instance in ranked)


def is_unconnected(alive: Sequence[Instance], wanted: int | None) -> bool:
    """Return whether `up` has never connected these machines.

    `up` buys either the head first, or all nodes together and then makes one the head. A cluster without
    a head and with missing nodes has lost its head.
    """
    has_head = any(instance.role == HEAD for instance in alive)
    is_whole = len(alive) == wanted
    return (has_head or is_whole) and not any(tags.MESH in instance.tags for instance in alive)


def _not_complete(name: str, flags: str) -> SprError:
    return SprError(
        f"cluster {name} is not complete: `up` has not connected its nodes yet",
        hint=f"if no `up` is running, `spr-cluster up {flags}` continues",
    )


def describe_stuck(
    record: ClusterRecord, machines: Sequence[Instance], now: datetime, *, billed: bool
) -> str:
    """Return which machines outlived a cluster, such as ``i-1 did not shut down and still costs money``."""
    if not machines or not record.is_late(now):
        return ""
    s = "s" if len(machines) == 1 else ""
    still = f"cost{s} money" if billed else f"run{s}"
    return f"{', '.join(machine.id for machine in machines)} did not shut down and still {still}"


def find_cluster(ec2: EC2Client, cloud: Cloud, name: str, now: datetime) -> Cluster:
    """Find a running cluster by its tags alone.

    Raises :class:`UsageError` if there is none, or if it has no head.
    """
    found = describe_inventory(ec2, name, ("instances", "security_groups"))
    place = place_options(name, cloud.name, cloud.region)
    record, flags = found.record, f"--name {name}{place}"
    jump = record.options["jump"] if record else None
    bucket = (record.options.get("bucket") if record else None) or ""
    about: Any = {"bucket": bucket, "flag": cloud.flag, "is_gone": not found.alive}
    running = [instance for instance in found.instances if instance.state == "running"]
    nodes = rank_nodes(running, record.nodes if record else len(running), jump)
    has_head = bool(nodes) and nodes[0].instance.role == HEAD
    if not has_head and record and record.is_over(now):
        if stuck := describe_stuck(record, found.alive, now, billed=cloud.billed):
            raise NoClusterError(
                f"the time to live of cluster {name!r} is over; {stuck}",
                hint=f"to remove what is left: spr-cluster down {flags}",
                **about,
            )
        raise NoClusterError(
            f"the nodes of cluster {name!r} shut down at the end of its time to live, "
            f"{spoken_day(record.expires)}, with all jobs, checkpoints, and models on them",
            hint=f"`spr-cluster up {flags}` creates new ones; `spr-cluster down {flags}` removes the rest",
            **about,
        )
    if not nodes:
        raise NoClusterError(
            f"no cluster {name!r} is running in {cloud.region}{nearest_cluster(name)}",
            hint=f"`spr-cluster up {flags}` creates one; --name, --cloud, and --region choose another",
            **about,
        )
    if not has_head:
        wanted = record.nodes if record else None
        if is_unconnected([node.instance for node in nodes], wanted):
            raise _not_complete(name, flags)
        raise UsageError(
            f"cluster {name!r} has no running head node",
            hint=f"`spr-cluster repair {flags}` makes a worker the head, "
            f"`spr-cluster down {flags}` removes the cluster",
        )
    wanted = record.nodes if record else len(nodes)
    if not record:
        return Cluster(name, nodes, wanted, place)
    proxy = record.options.get("proxy") or ""
    near = [word for node in nodes for word in (node.name, node.private_ip)]
    environment = proxy_environment(proxy, cloud.region, near)
    known = (record.expires, bucket, environment, record.options, record.created, record.job_ends)
    return Cluster(name, nodes, wanted, place, *known)
