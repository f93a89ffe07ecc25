"""Machines and images over time, and their fates."""

from __future__ import annotations

from typing import Any

import pytest

from infra.local.state import StateFolder
from tests.infra.local.fakes import FakeCloud, FakePodman, refusal


@pytest.fixture
def cloud(timed_cloud: FakeCloud) -> FakeCloud:
    """An embedded cloud as slow as bare metal, whose time passes only when a test sleeps."""
    timed_cloud.faults('profile = "metal"\n')
    return timed_cloud


def status_of(cloud: FakeCloud, instance_id: str) -> str:
    answer = cloud.ec2.describe_instance_status(InstanceIds=[instance_id], IncludeAllInstances=True)
    (status,) = answer["InstanceStatuses"]
    assert status["InstanceStatus"] == status["SystemStatus"]
    return str(status["InstanceStatus"]["Status"])


def test_a_machine_keeps_its_resources_until_it_has_ended(
    cloud: FakeCloud, podman: FakePodman
) -> None:
    ec2 = cloud.ec2
    group = ec2.create_security_group(GroupName="g", Description="d")["GroupId"]
    ids = cloud.run(SecurityGroupIds=[group])
    cloud.clock.sleep(20)
    ended = ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"][0]
    assert (ended["PreviousState"]["Name"], ended["CurrentState"]["Name"]) == (
        "running",
        "shutting-down",
    )
    assert cloud.state_of(ids[0]) == "shutting-down"
    assert podman.state == {}
    assert refusal(ec2.delete_security_group, GroupId=group) == "DependencyViolation"
    assert len(ec2.describe_volumes()["Volumes"]) == 1
    again = ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"][0]
    assert again["PreviousState"]["Name"] == "shutting-down"
    cloud.clock.sleep(5)
    assert cloud.state_of(ids[0]) == "terminated"
    assert cloud.describe(ids[0])["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert ec2.describe_volumes()["Volumes"] == []
    ec2.delete_security_group(GroupId=group)


def test_an_image_takes_time_and_its_snapshot_appears_earlier(cloud: FakeCloud) -> None:
    mapping = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100}}
    (instance_id,) = cloud.run(BlockDeviceMappings=[mapping])
    cloud.clock.sleep(20)
    image_id = cloud.ec2.create_image(InstanceId=instance_id, Name="img", NoReboot=True)["ImageId"]
    cloud.backend.images.copies[image_id].future.result(60)

    def image() -> Any:
        return cloud.ec2.describe_images(ImageIds=[image_id])["Images"][0]

    (snapshot,) = cloud.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
    assert (image()["State"], snapshot["State"], snapshot["VolumeSize"]) == (
        "pending",
        "pending",
        100,
    )
    assert image()["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 100
    cloud.clock.sleep(60)
    assert image()["State"] == "available"
    (snapshot,) = cloud.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
    assert snapshot["State"] == "completed"


def test_a_snapshot_in_progress_is_deleted_when_it_is_complete(cloud: FakeCloud) -> None:
    (instance_id,) = cloud.run()
    cloud.clock.sleep(20)
    image_id = cloud.ec2.create_image(InstanceId=instance_id, Name="img", NoReboot=True)["ImageId"]
    cloud.backend.images.copies[image_id].future.result(60)
    (snapshot,) = cloud.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
    cloud.ec2.deregister_image(ImageId=image_id)

    cloud.ec2.delete_snapshot(SnapshotId=snapshot["SnapshotId"])

    assert cloud.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"] == [snapshot]
    cloud.clock.sleep(60)
    assert cloud.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"] == []


def test_pending_events_survive_the_server(
    cloud: FakeCloud, folder: StateFolder, podman: FakePodman
) -> None:
    booting, ending = cloud.run(2)
    cloud.ec2.terminate_instances(InstanceIds=[ending])
    clock = cloud.clock
    with cloud.endpoint.serve(folder, podman, clock=clock) as resumed:
        assert [resumed.state_of(i) for i in (booting, ending)] == ["pending", "shutting-down"]
        clock.sleep(20)
        assert [resumed.state_of(i) for i in (booting, ending)] == ["running", "terminated"]


# The console


def test_the_console_shows_the_host_keys_once_they_exist(
    cloud: FakeCloud, podman: FakePodman
) -> None:
    (instance_id,) = cloud.run()
    assert cloud.ec2.get_console_output(InstanceId=instance_id).get("Output", "") == ""
    cloud.clock.sleep(20)
    # botocore decodes it.
    assert cloud.ec2.get_console_output(InstanceId=instance_id)["Output"].splitlines() == [
        "-----BEGIN SSH HOST KEY KEYS-----",
        "ssh-ed25519 AAAAfake root@fake",
        "-----END SSH HOST KEY KEYS-----",
    ]
    podman.keys = ()
    assert cloud.ec2.get_console_output(InstanceId=instance_id).get("Output", "") == ""
