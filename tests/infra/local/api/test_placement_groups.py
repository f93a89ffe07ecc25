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


def names(cloud: FakeCloud, **request: Any) -> list[str]:
    found = cloud.ec2.describe_placement_groups(**request)["PlacementGroups"]
    return [group["GroupName"] for group in found]


def test_a_group_is_created_found_and_deleted(fake_cloud: FakeCloud) -> None:
    ec2 = fake_cloud.ec2
    made = make(fake_cloud)
    assert (made["Strategy"], made["State"]) == ("cluster", "available")
    assert made["Tags"] == [{"Key": "cluster", "Value": "c"}]
    make(fake_cloud, "far", other="x")
    assert names(fake_cloud) == ["near", "far"]
    assert names(fake_cloud, GroupNames=["far"]) == ["far"]
    for name, value in (("group-name", "near"), ("tag:cluster", "c"), ("tag-key", "cluster")):
        assert names(fake_cloud, Filters=[{"Name": name, "Values": [value]}]) == ["near"]
    ec2.delete_placement_group(GroupName="near")
    assert names(fake_cloud) == ["far"]
    assert [[*tags] for tags in fake_cloud.backend.tags.values()] == [["other"]]


def test_duplicate_and_unknown_groups_are_refused(fake_cloud: FakeCloud) -> None:
    ec2 = fake_cloud.ec2
    make(fake_cloud)
    request = {"GroupName": "near", "Strategy": "cluster"}
    assert refusal(ec2.create_placement_group, **request) == "InvalidPlacementGroup.Duplicate"
    unknown = "InvalidPlacementGroup.Unknown"
    assert refusal(ec2.delete_placement_group, GroupName="far") == unknown
    assert refusal(ec2.describe_placement_groups, GroupNames=["far"]) == unknown
    assert refusal(fake_cloud.run, Placement={"GroupName": "far"}) == unknown
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
