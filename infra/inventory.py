"""What exists of a cluster, by its tags alone: every kind of resource that we could have made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from infra import tags
from infra.images import Image
from infra.instances import ALIVE, Instance, describe_instances

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

_DYING = (*ALIVE, "shutting-down")


@dataclass(frozen=True)
class Inventory:
    """Everything that carries a cluster's tag, machines aside by id."""

    instances: tuple[Instance, ...] = ()
    volumes: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    key_pairs: tuple[str, ...] = ()
    images: tuple[Image, ...] = ()
    snapshots: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def ids(self) -> dict[str, list[str]]:
        """The ids by kind; kinds with none are left out."""
        found = {
            field.name: [getattr(item, "id", item) for item in getattr(self, field.name)]
            for field in fields(self)
        }
        return {kind: ids for kind, ids in found.items() if ids}

    def __str__(self) -> str:
        return "; ".join(
            f"{len(ids)} {kind.replace('_', ' ')} ({', '.join(ids)})"
            for kind, ids in self.ids().items()
        )

    def counts(self) -> str:
        """How many there are of each kind."""
        return ", ".join(f"{len(ids)} {kind.replace('_', ' ')}" for kind, ids in self.ids().items())

    def without_image(self) -> Inventory:
        """The same without images and their snapshots, which a user may wish to keep."""
        return Inventory(
            self.instances, self.volumes, self.interfaces, self.security_groups, self.key_pairs
        )


def describe_inventory(ec2: EC2Client, cluster: str) -> Inventory:
    """List by tag what exists of a cluster now, machines on their way out included."""
    by_tag = tags.cluster_filter(cluster)
    volumes = ec2.get_paginator("describe_volumes").paginate(Filters=by_tag)
    interfaces = ec2.get_paginator("describe_network_interfaces").paginate(Filters=by_tag)
    groups = ec2.get_paginator("describe_security_groups").paginate(Filters=by_tag)
    images = ec2.get_paginator("describe_images").paginate(Owners=["self"], Filters=by_tag)
    snapshots = ec2.get_paginator("describe_snapshots").paginate(OwnerIds=["self"], Filters=by_tag)
    return Inventory(
        instances=describe_instances(ec2, by_tag, _DYING),
        volumes=tuple(v["VolumeId"] for page in volumes for v in page["Volumes"]),
        interfaces=tuple(
            i["NetworkInterfaceId"] for page in interfaces for i in page["NetworkInterfaces"]
        ),
        security_groups=tuple(g["GroupId"] for page in groups for g in page["SecurityGroups"]),
        key_pairs=tuple(k["KeyName"] for k in ec2.describe_key_pairs(Filters=by_tag)["KeyPairs"]),
        images=tuple(Image.from_aws(i) for page in images for i in page["Images"]),
        snapshots=tuple(s["SnapshotId"] for page in snapshots for s in page["Snapshots"]),
    )


def describe_cluster_names(ec2: EC2Client) -> tuple[str, ...]:
    """The names of all clusters that have a machine in this region."""
    found = describe_instances(ec2, [{"Name": "tag-key", "Values": [tags.CLUSTER]}])
    return tuple(sorted({instance.tags[tags.CLUSTER] for instance in found}))
