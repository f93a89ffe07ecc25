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
        self._cloud, self._cluster, self._name = cloud, cluster, f"left-{cluster}"
        self._ec2: Any = cloud.clients.ec2

    def _make(self, operation: str, kind: str, **request: Any) -> Any:
        tagged = specification(kind, self._cluster)
        return getattr(self._ec2, operation)(TagSpecifications=tagged, **request)

    def volumes(self) -> str:
        place = {"AvailabilityZone": "us-east-1a", "Size": 8}
        return str(self._make("create_volume", "volume", **place)["VolumeId"])

    def interfaces(self) -> str:
        subnet = self._ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        made = self._make("create_network_interface", "network-interface", SubnetId=subnet)
        return str(made["NetworkInterface"]["NetworkInterfaceId"])

    def placement_groups(self) -> str:
        request = {"GroupName": self._name, "Strategy": "cluster"}
        self._make("create_placement_group", "placement-group", **request)
        return self._name

    def security_groups(self, **more: str) -> str:
        request = {"GroupName": self._name, "Description": "left", **more}
        return str(self._make("create_security_group", "security-group", **request)["GroupId"])

    def key_pairs(self) -> str:
        return str(self._make("create_key_pair", "key-pair", KeyName=self._name)["KeyPairId"])

    def spot_requests(self) -> str:
        tagged = specification("spot-instances-request", self._cluster)
        spot = {"MarketType": "spot"}
        (machine,) = self._cloud.run(1, InstanceMarketOptions=spot, TagSpecifications=tagged)
        return str(self._cloud.describe(machine)["SpotInstanceRequestId"])

    def instances(self) -> str:
        return self._cloud.run(1, TagSpecifications=specification("instance", self._cluster))[0]

    def images(self) -> str:
        request = {"InstanceId": self._cloud.run(1)[0], "Name": self._name}
        return str(self._make("create_image", "image", **request)["ImageId"])

    def snapshots(self) -> str:
        machine = self._cloud.describe(self._cloud.run(1)[0])
        volume = machine["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
        return str(self._make("create_snapshot", "snapshot", VolumeId=volume)["SnapshotId"])


KINDS: dict[str, Callable[[ResourceFactory], str]] = {
    name: getattr(ResourceFactory, name)
    for name in Inventory.__dataclass_fields__
    if name not in ("guards", "instance_profiles")
}
