"""Machines: bought in one call, watched, and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from infra import access, tags
from infra.catalogue import CATALOGUE
from infra.clients import when_visible
from infra.errors import CloudError
from infra.images import Image
from infra.wait import BOOT_DEADLINE_S, TERMINATE_DEADLINE_S, Clock, wait_until

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import FilterTypeDef, InstanceTypeDef

    from infra.spec import ClusterSpec

HEAD, WORKER = "head", "worker"
ALIVE = ("pending", "running", "stopping", "stopped")
# EC2 takes no more values than that in one filter.
_FILTER_VALUES = 200
_ANY_STATE = (*ALIVE, "shutting-down", "terminated")
_LAUNCH_RESOURCES = ("instance", "volume", "network-interface")


@dataclass(frozen=True)
class Instance:
    """A machine as EC2 sees it."""

    id: str
    state: str
    role: str
    private_ip: str
    public_ip: str
    launch_index: int
    launch_time: datetime
    instance_type: str
    zone: str
    tags: dict[str, str]
    reason: str = ""

    @staticmethod
    def from_aws(instance: InstanceTypeDef) -> Instance:
        labels = tags.from_aws(instance.get("Tags"))
        return Instance(
            id=instance["InstanceId"],
            state=instance["State"]["Name"],
            role=labels.get(tags.ROLE, ""),
            private_ip=instance.get("PrivateIpAddress", ""),
            public_ip=instance.get("PublicIpAddress", ""),
            launch_index=instance.get("AmiLaunchIndex", 0),
            launch_time=instance["LaunchTime"],
            instance_type=instance["InstanceType"],
            zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
            tags=labels,
            reason=instance.get("StateReason", {}).get("Message", ""),
        )

    @property
    def expires(self) -> datetime | None:
        """When the machine ends itself, by its tag."""
        text = self.tags.get(tags.EXPIRES)
        return tags.parse_time(text) if text else None

    def accrued_usd(self, now: datetime) -> float:
        """What the machine has cost since its launch; 0 for a type whose price is unknown."""
        known = CATALOGUE.get(self.instance_type)
        hours = (now - self.launch_time).total_seconds() / 3600
        return max(0.0, hours) * known.usd_per_hour if known else 0.0


@dataclass(frozen=True)
class LaunchRequest:
    """What RunInstances is asked for; ``count`` machines alike, all of them or none."""

    spec: ClusterSpec
    role: str
    count: int
    image: Image
    subnet_id: str
    group_id: str
    user_data: str
    labels: dict[str, str]


def run_instances(ec2: EC2Client, request: LaunchRequest) -> tuple[Instance, ...]:
    """Buy machines in one call, tagged in that call."""
    spec = request.spec
    labels = tags.resource_tags(
        spec.name, request.role, **{tags.ROLE: request.role}, **request.labels
    )
    # EC2 may not know yet, everywhere, of a group or key made seconds ago.
    answer = when_visible(
        ec2.run_instances,
        ImageId=request.image.id,
        InstanceType=spec.machine.name,
        MinCount=request.count,
        MaxCount=request.count,
        KeyName=access.key_name(spec.name),
        UserData=request.user_data,
        NetworkInterfaces=[
            {
                "DeviceIndex": 0,
                "SubnetId": request.subnet_id,
                "Groups": [request.group_id],
                "AssociatePublicIpAddress": True,
                "DeleteOnTermination": True,
            }
        ],
        BlockDeviceMappings=[
            {
                "DeviceName": request.image.root_device,
                "Ebs": {
                    "VolumeSize": spec.volume_gib,
                    "VolumeType": "gp3",
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        MetadataOptions={
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        # A machine that ends itself, by its time to live, must not stay as a stopped, paid-for disk.
        InstanceInitiatedShutdownBehavior="terminate",
        TagSpecifications=tags.tag_specifications(_LAUNCH_RESOURCES, labels),
    )
    return tuple(Instance.from_aws(i) for i in answer["Instances"])


def describe_instances(
    ec2: EC2Client, filters: Sequence[FilterTypeDef], states: Iterable[str] = ALIVE
) -> tuple[Instance, ...]:
    """Machines that match, oldest first, in the order of their launch."""
    state_filter: FilterTypeDef = {"Name": "instance-state-name", "Values": list(states)}
    pages = ec2.get_paginator("describe_instances").paginate(Filters=[*filters, state_filter])
    found = [
        Instance.from_aws(instance)
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]
    return tuple(sorted(found, key=lambda i: (i.launch_time, i.launch_index, i.id)))


def _describe_by_id(ec2: EC2Client, ids: Sequence[str]) -> tuple[Instance, ...]:
    """The machines of these ids; those that EC2 does not show yet, or no more, are left out.

    Asked as a filter, EC2 does not refuse the whole answer for one unknown id.
    """
    found = [
        instance
        for first in range(0, len(ids), _FILTER_VALUES)
        for instance in describe_instances(
            ec2,
            [{"Name": "instance-id", "Values": ids[first : first + _FILTER_VALUES]}],
            _ANY_STATE,
        )
    ]
    return tuple(sorted(found, key=lambda instance: ids.index(instance.id)))


def wait_until_running(
    ec2: EC2Client,
    ids: Sequence[str],
    *,
    on_wait: Callable[[float], None] | None = None,
    clock: Clock | None = None,
) -> tuple[Instance, ...]:
    """Wait until all are running, at most 40 minutes; raises :class:`CloudError` where one died."""

    def probe() -> tuple[Instance, ...] | None:
        found = _describe_by_id(ec2, ids)
        for instance in found:
            if instance.state not in ("pending", "running"):
                raise CloudError(
                    f"instance {instance.id} is {instance.state}: {instance.reason or 'no reason given'}"
                )
        ready = len(found) == len(ids) and all(i.state == "running" for i in found)
        return found if ready else None

    return wait_until(
        f"instances {', '.join(ids)} running",
        probe,
        deadline_s=BOOT_DEADLINE_S,
        clock=clock,
        on_wait=on_wait,
    )


def terminate_instances(ec2: EC2Client, ids: Sequence[str], clock: Clock | None = None) -> None:
    """Give machines back and wait until EC2 says that they are gone."""
    if not ids:
        return
    ec2.terminate_instances(InstanceIds=list(ids))

    def probe() -> bool | None:
        states = {instance.state for instance in _describe_by_id(ec2, ids)}
        return True if states <= {"terminated"} else None

    wait_until(
        f"instances {', '.join(ids)} terminated",
        probe,
        deadline_s=TERMINATE_DEADLINE_S,
        clock=clock,
    )
