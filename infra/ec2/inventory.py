"""All of a cluster's resources, of every kind that the tool can create, found by their tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord, parse_record
from infra.ec2.images import PAGES, Image
from infra.ec2.instances import DYING, Instance, describe_instances
from infra.ec2.network import SecurityGroup

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client


@dataclass(frozen=True)
class Resource:
    """A resource of a kind for which only these fields matter."""

    id: str
    tags: dict[str, str] = field(repr=False)
    state: str = ""
    """EC2's state, such as ``pending`` or ``completed`` for a snapshot."""
    public: str = ""
    """A key pair's public half: type and base64 without the comment."""


@dataclass(frozen=True)
class SecondGuard:
    """A cluster's schedule group and role, and the machines that have a schedule."""

    id: str
    machines: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Inventory:
    """All resources that carry a cluster's tag."""

    instances: tuple[Instance, ...] = ()
    spot_requests: tuple[Resource, ...] = ()
    volumes: tuple[Resource, ...] = ()
    interfaces: tuple[Resource, ...] = ()
    security_groups: tuple[SecurityGroup, ...] = ()
    placement_groups: tuple[Resource, ...] = ()
    key_pairs: tuple[Resource, ...] = ()
    images: tuple[Image, ...] = ()
    snapshots: tuple[Resource, ...] = ()
    guards: tuple[SecondGuard, ...] = ()
    """Added by :mod:`infra.ec2.termination_schedule`, because they are not EC2 resources."""
    instance_profiles: tuple[Resource, ...] = ()
    """Added by :mod:`infra.iam.instance_profile`; in state ``ready`` or, without its role, ``""``."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def ids(self) -> dict[str, list[str]]:
        """Return the ids by kind; omits empty kinds."""
        found = {each.name: [i.id for i in getattr(self, each.name)] for each in fields(self)}
        return {kind: ids for kind, ids in found.items() if ids}

    def __str__(self) -> str:
        return "; ".join(
            f"{_count(kind, ids)} ({', '.join(ids)})" for kind, ids in self.ids().items()
        )

    def counts(self) -> str:
        """Return the counts by kind as text, such as ``2 instances, 1 volume``."""
        return ", ".join(_count(kind, ids) for kind, ids in self.ids().items())

    @property
    def billed_rest(self) -> str:
        """What costs money also without machines, such as ``image``; "" if nothing does."""
        costs = {"image": self.images or self.snapshots, "disk": self.volumes}
        return ", ".join(kind for kind, found in costs.items() if found)

    def without_image(self) -> Inventory:
        """Return the inventory without images and snapshots, which users can keep."""
        return replace(self, images=(), snapshots=())

    def without(self, kept: Inventory) -> Inventory:
        """Return the inventory without the resources in ``kept``."""
        ids = {id_ for listed in kept.ids().values() for id_ in listed}
        rest = {
            each.name: tuple(item for item in getattr(self, each.name) if item.id not in ids)
            for each in fields(self)
        }
        return Inventory(**rest)

    def only(self, images: Iterable[Image]) -> Inventory:
        """Return these of its images, with their snapshots."""
        kept = tuple(images)
        others = {id_ for image in self.images if image not in kept for id_ in image.snapshot_ids}
        # EC2 may not have listed a snapshot with its image yet.
        snapshots = tuple(each for each in self.snapshots if kept and each.id not in others)
        return Inventory(images=kept, snapshots=snapshots)

    @property
    def kept(self) -> Inventory:
        """The images that the user keeps, with their snapshots."""
        labeled = (image for image in self.images if image.tags.get(tags.KEPT) == "yes")
        return self.only(image for image in labeled if image.is_for_others)

    @property
    def alive(self) -> tuple[Instance, ...]:
        """The machines that are not shutting down."""
        return tuple(i for i in self.instances if i.state != "shutting-down")

    @property
    def group(self) -> SecurityGroup | None:
        """The machines' security group; others can be leftovers in other networks.

        The machines and their group carry the same key's fingerprint.
        """
        owners = {machine.tags.get(tags.OWNER_KEY) for machine in self.alive}
        ours = (g for g in self.security_groups if g.tags.get(tags.OWNER_KEY) in owners)
        return next(chain(ours, self.security_groups), None)

    @property
    def owner(self) -> str:
        """The ARN of the cluster's creator, from the first resource tagged with it; else ""."""
        group = (self.group,) if self.group else ()
        tagged = (*group, *self.alive, *self.key_pairs, *self.placement_groups, *self.images)
        return next((owner for each in tagged if (owner := each.tags.get(tags.OWNER))), "")

    @property
    def record(self) -> ClusterRecord | None:
        """The cluster's recorded options. Raises :class:`SprError` if they are unreadable."""
        return parse_record(self.group.tags) if self.group else None


def _count(kind: str, ids: Sequence[str]) -> str:
    plural = kind.replace("_", " ")
    return f"{len(ids)} {plural if len(ids) != 1 else re.sub('(?<=ss)es$|s$', '', plural)}"


Fetch = Callable[["EC2Client", list[Any]], Iterable[Any]]


def _fetch(operation: str, key: str, build: Callable[[Any], Any], *only: Any, **more: Any) -> Fetch:
    def fetch(ec2: EC2Client, filters: list[Any]) -> Iterable[Any]:
        client: Any = ec2
        wanted = {"Filters": [*filters, *only], **more}
        if ec2.can_paginate(operation):
            pages = client.get_paginator(operation).paginate(**wanted)
        else:
            pages = [getattr(client, operation)(**wanted)]
        return [build(item) for page in pages for item in page[key]]

    return fetch


def _resource(id_key: str, tags_key: str = "Tags") -> Callable[[Any], Resource]:
    return lambda item: Resource(
        item[id_key], tags.from_aws(item.get(tags_key)), str(item.get("State", ""))
    )


def _key_pair(item: Mapping[str, Any]) -> Resource:
    public = " ".join(item.get("PublicKey", "").split()[:2])
    return Resource(item["KeyPairId"], tags.from_aws(item.get("Tags")), public=public)


_KINDS: dict[str, Fetch] = {
    "instances": lambda ec2, filters: describe_instances(ec2, filters, DYING),
    "spot_requests": _fetch(
        "describe_spot_instance_requests",
        "SpotInstanceRequests",
        _resource("SpotInstanceRequestId"),
        # EC2 lists closed ones for hours.
        {"Name": "state", "Values": ["active", "open"]},
    ),
    "volumes": _fetch("describe_volumes", "Volumes", _resource("VolumeId")),
    "interfaces": _fetch(
        "describe_network_interfaces",
        "NetworkInterfaces",
        _resource("NetworkInterfaceId", "TagSet"),
    ),
    "security_groups": _fetch("describe_security_groups", "SecurityGroups", SecurityGroup.from_aws),
    "placement_groups": _fetch(
        "describe_placement_groups", "PlacementGroups", _resource("GroupName")
    ),
    "key_pairs": _fetch("describe_key_pairs", "KeyPairs", _key_pair, IncludePublicKey=True),
    "images": _fetch("describe_images", "Images", Image.from_aws, Owners=["self"], **PAGES),
    "snapshots": _fetch(
        "describe_snapshots", "Snapshots", _resource("SnapshotId"), OwnerIds=["self"], **PAGES
    ),
}
ALL_KINDS = tuple(_KINDS)
_ANY_CLUSTER: list[Any] = [{"Name": "tag-key", "Values": [tags.CLUSTER]}]
# The kinds that `up` needs for its plan.
PLANNED_KINDS = ("instances", "security_groups", "placement_groups", "key_pairs", "images")


def describe_inventory(ec2: EC2Client, cluster: str, kinds: Iterable[str] = ALL_KINDS) -> Inventory:
    """Return a cluster's resources, including machines that are shutting down."""
    found = {kind: tuple(_KINDS[kind](ec2, [*tags.cluster_filter(cluster)])) for kind in kinds}
    return Inventory(**found)


def find_group(ec2: EC2Client, cluster: str) -> Inventory:
    """Return a cluster's security group, with its record; only machines tell it from another's."""
    found = describe_inventory(ec2, cluster, ("security_groups",))
    if len(found.security_groups) > 1:
        return describe_inventory(ec2, cluster, ("instances", "security_groups"))
    return found


def describe_terminated(ec2: EC2Client) -> dict[str, list[Instance]]:
    """Return the account's terminated machines that EC2 still lists, by cluster name."""
    found: dict[str, list[Instance]] = {}
    for machine in describe_instances(ec2, _ANY_CLUSTER, ("terminated",)):
        found.setdefault(machine.tags[tags.CLUSTER], []).append(machine)
    return found


def describe_inventories(ec2: EC2Client, kinds: Iterable[str] = ALL_KINDS) -> dict[str, Inventory]:
    """Return the resources of all of the account's clusters in a region, by cluster name."""
    clusters: dict[str, dict[str, list[Any]]] = {}
    for kind in kinds:
        for item in _KINDS[kind](ec2, _ANY_CLUSTER):
            clusters.setdefault(item.tags[tags.CLUSTER], {}).setdefault(kind, []).append(item)
    return {
        name: Inventory(**{kind: tuple(items) for kind, items in clusters[name].items()})
        for name in sorted(clusters)
    }
