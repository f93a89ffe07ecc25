"""Placement groups."""

from __future__ import annotations

import time
from typing import Any

from tests.infra.local.fakes import FakeCloud, FakePodman, FakeTime, refusal, tags

NEAR = {"Placement": {"GroupName": "near"}}


def make(cloud: FakeCloud, name: str = "near", **values: str) -> Any:
    return cloud.ec2.create_placement_group(
        GroupName=name,
        Strategy="cluster",
        TagSpecifications=tags("placement-group", **(values or {"cluster": "c"})),
    )["PlacementGroup"]


def test_a_group_is_created_found_and_deleted(fake_cloud: FakeCloud) -> None:
    def names(**request: Any) -> list[str]:
        found = ec2.describe_placement_groups(**request)["PlacementGroups"]
        return [group["GroupName"] for group in found]

    ec2, made = fake_cloud.ec2, make(fake_cloud)
    assert (made["Strategy"], made["State"]) == ("cluster", "available")
    assert made["Tags"] == [{"Key": "cluster", "Value": "c"}]
    make(fake_cloud, "far", other="x")
    assert (names(), names(GroupNames=["far"])) == (["near", "far"], ["far"])
    for name, value in (("group-name", "near"), ("tag:cluster", "c"), ("tag-key", "cluster")):
        assert names(Filters=[{"Name": name, "Values": [value]}]) == ["near"]
    assert refusal(make, cloud=fake_cloud) == "InvalidPlacementGroup.Duplicate"
    ec2.delete_placement_group(GroupName="near")
    assert names() == ["far"]
    assert [[*tags] for tags in fake_cloud.backend.tags.values()] == [["other"]]
    unknown = "InvalidPlacementGroup.Unknown"
    assert refusal(ec2.delete_placement_group, GroupName="near") == unknown
    assert refusal(ec2.describe_placement_groups, GroupNames=["near"]) == unknown
    assert refusal(fake_cloud.run, **NEAR) == unknown
    assert ec2.describe_instances()["Reservations"] == []


def test_a_group_with_machines_stays_until_they_have_ended(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    make(fake_cloud)
    ids = fake_cloud.run(2, **NEAR)
    assert fake_cloud.describe(ids[0])["Placement"]["GroupName"] == "near"
    # It survives the server.
    with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
        ec2 = resumed.ec2
        in_use = "InvalidPlacementGroup.InUse"
        assert refusal(ec2.delete_placement_group, GroupName="near") == in_use
        resumed.faults("terminate_s = 1000\n")
        ec2.terminate_instances(InstanceIds=ids[:1])
        resumed.faults("")
        ec2.terminate_instances(InstanceIds=ids[1:])
        assert refusal(ec2.delete_placement_group, GroupName="near") == in_use
        resumed.backend.runtime.clock = FakeTime(time.time() + 3600)
        ec2.delete_placement_group(GroupName="near")
    assert podman.state == {}
