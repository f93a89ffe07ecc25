"""Eventual consistency: calls do not see new resources at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.infra.local.fakes import (
    Endpoint,
    FakeCloud,
    FakePodman,
    FakeTime,
    refusal,
    state_folder,
    tags,
)

KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPA3V5QSfvN5E5K9gkK0dqGyBQ8zGk2eSMJ0yHIE3uEh me"


@pytest.fixture
def cloud(endpoint: Endpoint, tmp_path: Path, podman: FakePodman) -> Iterator[FakeCloud]:
    with endpoint.serve(state_folder(tmp_path), podman, clock=FakeTime()) as cloud:
        cloud.faults("visibility_s = 2\n")
        yield cloud


def all_ids(cloud: FakeCloud) -> set[str]:
    """Return the ids that all describe calls show."""
    ec2 = cloud.ec2
    own = {"Owners": ["self"]}
    answers: list[tuple[Callable[..., Any], dict[str, Any], str, str]] = [
        (ec2.describe_images, own, "Images", "ImageId"),
        (ec2.describe_snapshots, {"OwnerIds": ["self"]}, "Snapshots", "SnapshotId"),
        (ec2.describe_key_pairs, {}, "KeyPairs", "KeyPairId"),
        (ec2.describe_placement_groups, {}, "PlacementGroups", "GroupId"),
        (ec2.describe_security_groups, {}, "SecurityGroups", "GroupId"),
        (ec2.describe_volumes, {}, "Volumes", "VolumeId"),
        (ec2.describe_network_interfaces, {}, "NetworkInterfaces", "NetworkInterfaceId"),
        (ec2.describe_spot_instance_requests, {}, "SpotInstanceRequests", "SpotInstanceRequestId"),
        (ec2.describe_launch_templates, {}, "LaunchTemplates", "LaunchTemplateId"),
        (ec2.describe_tags, {}, "Tags", "ResourceId"),
        (ec2.describe_instance_status, {"IncludeAllInstances": True}, "InstanceStatuses", "InstanceId"),
    ]  # fmt: skip
    found = {item[id_] for call, request, key, id_ in answers for item in call(**request)[key]}
    for reservation in ec2.describe_instances()["Reservations"]:
        found |= {instance["InstanceId"] for instance in reservation["Instances"]}
    return found


def test_new_resources_are_hidden_and_then_shown(cloud: FakeCloud) -> None:
    ec2 = cloud.ec2
    before = all_ids(cloud)
    ec2.import_key_pair(KeyName="k", PublicKeyMaterial=KEY)
    ec2.create_placement_group(GroupName="near", Strategy="cluster")
    ec2.create_security_group(
        GroupName="g", Description="d", TagSpecifications=tags("security-group", a="b")
    )
    ec2.create_launch_template(LaunchTemplateName="template", LaunchTemplateData={"ImageId": "x"})
    (instance_id,) = cloud.run(InstanceMarketOptions={"MarketType": "spot"})
    assert all_ids(cloud) == before
    cloud.clock.sleep(1.9)
    assert all_ids(cloud) == before
    cloud.clock.sleep(0.2)
    ec2.create_image(InstanceId=instance_id, Name="img", NoReboot=True)
    cloud.backend.images.copies[next(iter(cloud.backend.images.copies))].future.result(60)
    kinds = {id_.split("-")[0] for id_ in all_ids(cloud) - before}
    assert kinds == {"i", "key", "pg", "sg", "lt", "sir", "vol", "eni"}
    cloud.clock.sleep(2)
    kinds = {id_.split("-")[0] for id_ in all_ids(cloud) - before}
    assert kinds == {"i", "key", "pg", "sg", "lt", "sir", "vol", "eni", "ami", "snap"}


def test_hidden_resources_are_not_found_by_id(cloud: FakeCloud, podman: FakePodman) -> None:
    ec2 = cloud.ec2
    group = ec2.create_security_group(GroupName="g", Description="d")["GroupId"]
    ec2.import_key_pair(KeyName="k", PublicKeyMaterial=KEY)
    ec2.create_placement_group(GroupName="near", Strategy="cluster")
    ids = cloud.run()
    rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    missing: list[tuple[Any, dict[str, Any], str]] = [
        (ec2.describe_instances, {"InstanceIds": ids}, "InvalidInstanceID.NotFound"),
        (ec2.terminate_instances, {"InstanceIds": ids}, "InvalidInstanceID.NotFound"),
        (ec2.describe_security_groups, {"GroupIds": [group]}, "InvalidGroup.NotFound"),
        (
            ec2.authorize_security_group_ingress,
            {"GroupId": group, "IpPermissions": rule},
            "InvalidGroup.NotFound",
        ),
        (ec2.describe_key_pairs, {"KeyNames": ["k"]}, "InvalidKeyPair.NotFound"),
        (
            ec2.create_tags,
            {"Resources": ids, "Tags": [{"Key": "a", "Value": "b"}]},
            "InvalidInstanceID.NotFound",
        ),
        (cloud.run, {"KeyName": "k"}, "InvalidKeyPair.NotFound"),
        (cloud.run, {"SecurityGroupIds": [group]}, "InvalidGroup.NotFound"),
        (cloud.run, {"Placement": {"GroupName": "near"}}, "InvalidPlacementGroup.Unknown"),
    ]
    for call, request, code in missing:
        assert refusal(call, **request) == code
    cloud.clock.sleep(2)
    assert cloud.state_of(ids[0]) == "running"
    assert cloud.run(KeyName="k", SecurityGroupIds=[group], Placement={"GroupName": "near"})
    assert len(podman.state) == 2
