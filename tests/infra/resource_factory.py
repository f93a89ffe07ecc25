"""Leftover resources, one of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infra.ec2 import tags
from infra.ec2.inventory import Inventory
from tests.infra.local.fakes import FakeCloud
from tests.infra.local.fakes import tags as tag_specification


def specification(kind: str, cluster: str) -> Any:
    return tag_specification(kind, **{tags.CLUSTER: cluster})


class ResourceFactory:
    """Creates leftover resources of each kind, with a cluster's tag."""

    def __init__(self, cloud: FakeCloud, cluster: str) -> None:
        self._cloud, self._cluster = cloud, cluster
        self._ec2: Any = cloud.clients.ec2

    def _tags(self, kind: str) -> Any:
        return specification(kind, self._cluster)

    def volumes(self) -> str:
        answer = self._ec2.create_volume(
            AvailabilityZone="us-east-1a", Size=8, TagSpecifications=self._tags("volume")
        )
        return str(answer["VolumeId"])

    def interfaces(self) -> str:
        subnet = self._ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        answer = self._ec2.create_network_interface(
            SubnetId=subnet, TagSpecifications=self._tags("network-interface")
        )
        return str(answer["NetworkInterface"]["NetworkInterfaceId"])

    def placement_groups(self) -> str:
        name = f"left-{self._cluster}"
        self._ec2.create_placement_group(
            GroupName=name, Strategy="cluster", TagSpecifications=self._tags("placement-group")
        )
        return name

    def security_groups(self) -> str:
        answer = self._ec2.create_security_group(
            GroupName=f"left-{self._cluster}",
            Description="left",
            TagSpecifications=self._tags("security-group"),
        )
        return str(answer["GroupId"])

    def key_pairs(self) -> str:
        name = f"left-{self._cluster}"
        answer = self._ec2.create_key_pair(KeyName=name, TagSpecifications=self._tags("key-pair"))
        return str(answer["KeyPairId"])

    def spot_requests(self) -> str:
        (machine,) = self._cloud.run(
            1,
            InstanceMarketOptions={"MarketType": "spot"},
            TagSpecifications=self._tags("spot-instances-request"),
        )
        return str(self._cloud.describe(machine)["SpotInstanceRequestId"])

    def instances(self) -> str:
        return self._cloud.run(1, TagSpecifications=self._tags("instance"))[0]

    def images(self) -> str:
        (machine,) = self._cloud.run(1)
        answer = self._ec2.create_image(
            InstanceId=machine, Name=f"left-{self._cluster}", TagSpecifications=self._tags("image")
        )
        return str(answer["ImageId"])

    def snapshots(self) -> str:
        (machine,) = self._cloud.run(1)
        volume = self._cloud.describe(machine)["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
        answer = self._ec2.create_snapshot(
            VolumeId=volume, TagSpecifications=self._tags("snapshot")
        )
        return str(answer["SnapshotId"])


KINDS: dict[str, Callable[[ResourceFactory], str]] = {
    name: getattr(ResourceFactory, name)
    for name in Inventory.__dataclass_fields__
    if name not in ("guards", "instance_profiles")
}
