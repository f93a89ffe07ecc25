"""EC2's calls on the embedded cloud: the answers, and what happens to the containers."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError

from infra.aws.clients import error_code
from infra.ec2.images import find_ubuntu_image, ubuntu_parameter
from infra.errors import CloudError
from infra.local.state import machine_lock
from infra.wait import wait_until
from tests.infra.local.fakes import (
    BASE,
    Endpoint,
    FakeCloud,
    FakePodman,
    refusal,
    state_folder,
    tags,
)

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPA3V5QSfvN5E5K9gkK0dqGyBQ8zGk2eSMJ0yHIE3uEh me"


def wait_for_image(cloud: FakeCloud, image_id: str) -> str:
    def probe() -> str | None:
        image = cloud.clients.ec2.describe_images(ImageIds=[image_id])["Images"][0]
        return None if image["State"] == "pending" else image["State"]

    return wait_until(f"image {image_id}", probe, deadline_s=60, every_s=0.1)


def make_image(cloud: FakeCloud, instance_id: str, name: str = "my-image") -> str:
    answer = cloud.clients.ec2.create_image(InstanceId=instance_id, Name=name, NoReboot=True)
    return str(answer["ImageId"])


# Launch


def test_an_instance_is_a_container_with_the_instances_address(fake_cloud: FakeCloud) -> None:
    fake_cloud.clients.ec2.import_key_pair(KeyName="k", PublicKeyMaterial=KEY.encode())
    user_data = "#cloud-config\nruncmd: [[touch, /ran]]\n"
    request = {"ImageId": BASE.ami_id, "InstanceType": "r7iz.metal-16xl", "KeyName": "k"}
    launch = {"MinCount": 1, "MaxCount": 1, "UserData": user_data, **request}
    (launched,) = fake_cloud.ec2.run_instances(**launch)["Instances"]
    # However fast it is.
    assert launched["State"]["Name"] == "pending"
    instance_id = launched["InstanceId"]

    instance, spec = fake_cloud.describe(instance_id), fake_cloud.spec(instance_id)
    assert instance["State"]["Name"] == "running"
    assert spec.address == instance["PrivateIpAddress"] == instance["PublicIpAddress"]
    assert spec.hostname == f"ip-{spec.address.replace('.', '-')}"
    assert spec.image == BASE.reference
    seed = fake_cloud.folder.seed(instance_id)
    assert json.loads((seed / "meta-data").read_text()) == {
        "instance-id": instance_id,
        "local-hostname": spec.hostname,
        "public-keys": [KEY],
    }
    assert (seed / "user-data").read_text() == user_data


def test_no_invented_address_reaches_an_answer(fake_cloud: FakeCloud) -> None:
    (instance_id,) = fake_cloud.run()
    fake_cloud.clients.ec2.stop_instances(InstanceIds=[instance_id])
    assert "PublicIpAddress" not in fake_cloud.describe(instance_id)
    fake_cloud.clients.ec2.start_instances(InstanceIds=[instance_id])

    instance = fake_cloud.describe(instance_id)
    interface = instance["NetworkInterfaces"][0]
    address = instance["PrivateIpAddress"]
    assert address.startswith("172.31.")
    assert instance["PublicIpAddress"] == interface["Association"]["PublicIp"] == address
    assert instance["PublicDnsName"] == ""
    refused = refusal(fake_cloud.clients.ec2.allocate_address, Domain="vpc")
    assert refused == "AddressLimitExceeded"


def test_addresses_are_assigned_once_and_cpus_evenly_also_after_a_restart(
    fake_cloud: FakeCloud, podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    first = [fake_cloud.spec(i) for i in fake_cloud.run(2)]
    # moto forgets its own position in a subnet when it is loaded again.
    with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
        specs = [*first, *(resumed.spec(i) for i in resumed.run(2))]
    assert [spec.address for spec in specs] == [f"172.31.0.{n}" for n in (4, 5, 6, 7)]
    assert [spec.cpus for spec in specs] == [(0,), (1,), (0,), (1,)]


def test_the_vpc_avoids_ranges_that_the_machine_uses(
    endpoint: Endpoint, tmp_path: Path, podman: FakePodman
) -> None:
    podman.create_network("docker-like", "172.31.128.0/24", "172.31.128.1", {})
    with endpoint.serve(state_folder(tmp_path), podman) as cloud:
        vpc = cloud.clients.ec2.describe_vpcs()["Vpcs"][0]
    assert vpc["CidrBlock"] == "172.30.0.0/16"


def test_clouds_that_start_together_choose_their_ranges_in_turn(
    endpoint: Endpoint, tmp_path: Path, podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_locked: list[bool] = []

    def give_up() -> None:
        raise InterruptedError

    def look(*_: Any) -> list[Any]:
        try:
            with machine_lock("network", give_up):
                is_locked.append(False)
        except InterruptedError:
            is_locked.append(True)
        return []

    monkeypatch.setattr("infra.local.api.ec2.used_ranges", look)
    monkeypatch.setattr(podman, "create_network", look)
    with endpoint.serve(state_folder(tmp_path), podman):
        look()
    assert is_locked == [True, True, False]


def test_a_launch_that_podman_refuses_leaves_nothing(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    podman.refuse = "run 172.31.0.5"
    with pytest.raises(ClientError, match="refused") as caught:
        fake_cloud.run(3, TagSpecifications=tags("instance", cluster="c"))
    podman.refuse = ""

    ec2 = fake_cloud.clients.ec2
    assert error_code(caught.value) == "InternalError"
    assert (podman.state, dict(fake_cloud.backend.tags)) == ({}, {})
    assert ec2.describe_instances()["Reservations"] == []
    assert ec2.describe_volumes()["Volumes"] == []
    assert ec2.describe_network_interfaces()["NetworkInterfaces"] == []
    assert len(fake_cloud.run(3)) == 3


def test_what_ec2_refuses_is_refused(fake_cloud: FakeCloud, podman: FakePodman) -> None:
    huge = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 65537}}
    asked: list[tuple[dict[str, Any], str]] = [
        ({"ImageId": "ami-12345678"}, "InvalidAMIID.NotFound"),
        ({"InstanceType": "r7iz.huge"}, "InvalidParameterValue"),
        ({"KeyName": "missing"}, "InvalidKeyPair.NotFound"),
        ({"ClientToken": "x" * 65}, "InvalidParameterValue"),
        ({"BlockDeviceMappings": [huge]}, "InvalidParameterValue"),
    ]
    for parameters, code in asked:
        assert refusal(fake_cloud.run, **parameters) == code
    assert podman.state == {}
    ec2, ids = fake_cloud.clients.ec2, fake_cloud.run()
    ec2.stop_instances(InstanceIds=ids)
    assert refusal(ec2.create_image, InstanceId=ids[0], Name="my-image") == "UnsupportedOperation"


def test_an_instance_outside_the_default_vpc_is_refused(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    ec2 = fake_cloud.clients.ec2
    vpc_id = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet_id = ec2.create_subnet(VpcId=vpc_id, CidrBlock="10.9.1.0/24")["Subnet"]["SubnetId"]
    assert refusal(fake_cloud.run, SubnetId=subnet_id) == "UnsupportedOperation"
    assert ec2.describe_instances()["Reservations"] == []


# Start, stop, reboot, terminate


def test_terminating_leaves_nothing_but_a_record_for_an_hour(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    ec2 = fake_cloud.clients.ec2
    instance_id, other = fake_cloud.run(2)
    seed = fake_cloud.folder.seed(instance_id)
    answer = ec2.terminate_instances(InstanceIds=[instance_id])["TerminatingInstances"][0]

    assert answer["CurrentState"]["Name"] == "shutting-down"
    ended = fake_cloud.describe(instance_id)
    assert ended["State"]["Name"] == "terminated"
    network = {"PrivateIpAddress", "PublicIpAddress", "NetworkInterfaces", "SubnetId", "VpcId"}
    assert [name for name in network & ended.keys() if ended[name]] == []
    assert list(podman.state) == [fake_cloud.container(other)]
    assert not seed.exists()
    assert len(ec2.describe_volumes()["Volumes"]) == 1
    assert len(ec2.describe_network_interfaces()["NetworkInterfaces"]) == 1
    ec2.terminate_instances(InstanceIds=[instance_id])
    assert fake_cloud.state_of(other) == "running"
    for change in (ec2.start_instances, ec2.stop_instances):
        assert refusal(change, InstanceIds=[instance_id]) == "IncorrectInstanceState"
    fake_cloud.backend.lifecycle.terminated_at[instance_id] = time.time() - 3601
    (reservation,) = ec2.describe_instances()["Reservations"]
    assert [instance["InstanceId"] for instance in reservation["Instances"]] == [other]


def test_an_instance_runs_until_its_container_is_removed(
    timed_cloud: FakeCloud, podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, other, lost = timed_cloud.run(3, InstanceInitiatedShutdownBehavior="terminate")
    podman.remove([timed_cloud.container(lost)])
    refuse = Mock(side_effect=CloudError("podman rm: refused", hint="try again"))
    with monkeypatch.context() as patch:
        patch.setattr(podman, "remove", refuse)
        with pytest.raises(ClientError, match=r"podman rm: refused$") as caught:
            timed_cloud.ec2.terminate_instances(InstanceIds=[called])
        assert error_code(caught.value) == "InternalError"
        podman.end(timed_cloud.container(other), 130)
        states = [timed_cloud.state_of(i) for i in (called, other, lost)]
    assert states == ["running", "running", "terminated"]
    assert timed_cloud.describe(lost)["StateReason"]["Code"] == "Server.InternalError"
    assert refuse.call_count == 2

    assert timed_cloud.state_of(other) == "running"
    timed_cloud.clock.sleep(30)
    assert timed_cloud.state_of(other) == "terminated"
    timed_cloud.ec2.terminate_instances(InstanceIds=[called])
    assert podman.state == {}


def test_a_podman_that_fails_is_not_asked_again_at_once(
    timed_cloud: FakeCloud, podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    (instance_id,) = timed_cloud.run()
    podman.end(timed_cloud.container(instance_id), 130)
    refuse = Mock(side_effect=CloudError("podman ps: refused"))
    with monkeypatch.context() as patch:
        patch.setattr(podman, "containers", refuse)
        for _ in range(5):
            timed_cloud.application.reconcile()
    assert refuse.call_count == 1
    timed_cloud.clock.sleep(30)
    assert timed_cloud.state_of(instance_id) == "stopped"


def test_a_full_disk_is_named_and_does_not_keep_containers(
    fake_cloud: FakeCloud, podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, ec2 = fake_cloud.run(2), fake_cloud.ec2
    group = {"GroupName": "g", "Description": "d"}
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    attached = {"InternetGatewayId": gateway, "VpcId": ec2.describe_vpcs()["Vpcs"][0]["VpcId"]}
    ec2.attach_internet_gateway(**attached)
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patch:
        patch.setattr("infra.local.api.application.save_snapshot", full)
        with pytest.raises(ClientError, match="No space left on device") as caught:
            ec2.terminate_instances(InstanceIds=ids[:1])
        # Only a call that frees something has effects.
        assert refusal(ec2.detach_internet_gateway, **attached) == "InternalError"
        assert ec2.describe_internet_gateways()["InternetGateways"][0]["Attachments"] == []
        assert refusal(ec2.terminate_instances, InstanceIds=ids[1:]) == "InternalError"
        assert refusal(ec2.create_security_group, **group) == "InternalError"
    assert error_code(caught.value) == "InternalError"
    assert str(fake_cloud.folder.root) in str(caught.value)
    assert podman.state == {}

    ec2.create_security_group(**group)
    with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
        assert [resumed.state_of(i) for i in ids] == ["terminated"] * 2


def test_stop_and_start_keep_container_and_address_even_if_a_start_fails(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    ec2 = fake_cloud.clients.ec2
    (instance_id,) = fake_cloud.run()
    address = fake_cloud.describe(instance_id)["PrivateIpAddress"]
    spec = fake_cloud.spec(instance_id)

    ec2.stop_instances(InstanceIds=[instance_id])
    assert fake_cloud.state_of(instance_id) == "stopped"
    assert not podman.state[spec.name].running
    podman.refuse = "start"
    assert refusal(ec2.start_instances, InstanceIds=[instance_id]) == "InternalError"
    assert fake_cloud.state_of(instance_id) == "stopped"
    podman.refuse = ""
    ec2.start_instances(InstanceIds=[instance_id])
    assert fake_cloud.state_of(instance_id) == "running"
    assert podman.state[spec.name].running
    assert fake_cloud.describe(instance_id)["PrivateIpAddress"] == address
    assert fake_cloud.spec(instance_id) is spec


@pytest.mark.parametrize(
    ("behavior", "exit_code", "state"),
    [("terminate", 130, "terminated"), ("stop", 130, "stopped"), ("terminate", 129, "running")],
)
def test_a_shutdown_or_reboot_inside_reaches_the_api(
    fake_cloud: FakeCloud, podman: FakePodman, behavior: str, exit_code: int, state: str
) -> None:
    (instance_id,) = fake_cloud.run(InstanceInitiatedShutdownBehavior=behavior)
    podman.end(fake_cloud.container(instance_id), exit_code)
    assert fake_cloud.state_of(instance_id) == state
    assert [c.running for c in podman.state.values()] == {
        "terminated": [],
        "stopped": [False],
        "running": [True],
    }[state]
    if state != "running":
        reason = fake_cloud.describe(instance_id)["StateReason"]["Code"]
        assert reason == "Client.InstanceInitiatedShutdown"


# Images


def test_the_base_image_is_published_as_canonicals(fake_cloud: FakeCloud) -> None:
    clients = fake_cloud.clients
    for release in ("20.04", "22.04", "24.04"):
        assert find_ubuntu_image(clients.ssm, clients.ec2, release).id == BASE.ami_id
    (image,) = clients.ec2.describe_images()["Images"]
    assert image["OwnerId"] == "099720109477"
    assert image["Public"] is True
    assert image["RootDeviceName"] == "/dev/sda1"
    assert image["Description"] == BASE.description
    assert clients.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"] == []
    parameter = clients.ssm.get_parameter(Name=ubuntu_parameter("24.04"))["Parameter"]
    assert parameter["DataType"] == "aws:ec2:image"
    assert refusal(clients.ec2.deregister_image, ImageId=BASE.ami_id) == "AuthFailure"


def test_an_image_is_pending_until_it_is_saved_and_then_starts_instances(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    ec2 = fake_cloud.clients.ec2
    (instance_id,) = fake_cloud.run()
    podman.copying_allowed.clear()
    image_id = ec2.create_image(
        InstanceId=instance_id,
        Name="my-image",
        NoReboot=True,
        TagSpecifications=[
            {"ResourceType": kind, "Tags": [{"Key": "kind", "Value": kind}]}
            for kind in ("image", "snapshot")
        ],
    )["ImageId"]
    image = ec2.describe_images(ImageIds=[image_id])["Images"][0]
    assert image["State"] == "pending"
    assert image["Tags"] == [{"Key": "kind", "Value": "image"}]
    # It would hold the disk's content from before the copy.
    assert ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"] == []
    assert refusal(fake_cloud.run, ImageId=image_id) == "InvalidAMIID.Unavailable"

    podman.copying_allowed.set()
    assert wait_for_image(fake_cloud, image_id) == "available"
    assert podman.copied == [fake_cloud.container(instance_id)]
    (snapshot,) = ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
    assert snapshot["Tags"] == [{"Key": "kind", "Value": "snapshot"}]
    (clone,) = fake_cloud.run(ImageId=image_id)
    assert fake_cloud.spec(clone).image == fake_cloud.folder.images / image_id


def test_an_image_that_can_not_be_copied_fails_with_the_reason(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    (instance_id,) = fake_cloud.run()
    podman.refuse = "copy"
    image_id = make_image(fake_cloud, instance_id)
    assert wait_for_image(fake_cloud, image_id) == "failed"
    image = fake_cloud.clients.ec2.describe_images(ImageIds=[image_id])["Images"][0]
    assert "refused" in image["StateReason"]["Message"]


def test_an_images_disk_stays_until_nothing_needs_it(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    ec2 = fake_cloud.clients.ec2
    (instance_id,) = fake_cloud.run()
    image_id = make_image(fake_cloud, instance_id)
    wait_for_image(fake_cloud, image_id)
    (clone,) = fake_cloud.run(ImageId=image_id)
    (snapshot,) = ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
    disk = Path(fake_cloud.spec(clone).image)

    snapshot_id = snapshot["SnapshotId"]
    assert refusal(ec2.delete_snapshot, SnapshotId=snapshot_id) == "InvalidSnapshot.InUse"
    ec2.deregister_image(ImageId=image_id)
    assert disk.is_dir()
    ec2.delete_snapshot(SnapshotId=snapshot_id)
    assert disk.is_dir()
    ec2.terminate_instances(InstanceIds=[clone])
    assert not disk.exists()


# Security groups


def test_a_security_group_in_use_stays(fake_cloud: FakeCloud) -> None:
    ec2 = fake_cloud.ec2
    used, other = (
        ec2.create_security_group(GroupName=name, Description="d")["GroupId"]
        for name in ("used", "other")
    )
    pairs = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": used}]}]
    ec2.authorize_security_group_ingress(GroupId=other, IpPermissions=pairs)
    ids = fake_cloud.run(NetworkInterfaces=[{"DeviceIndex": 0, "Groups": [used]}])
    assert [g["GroupId"] for g in fake_cloud.describe(ids[0])["SecurityGroups"]] == [used]
    assert refusal(ec2.delete_security_group, GroupId=used) == "DependencyViolation"
    ec2.terminate_instances(InstanceIds=ids)
    assert refusal(ec2.delete_security_group, GroupId=used) == "DependencyViolation"
    ec2.delete_security_group(GroupId=other)
    ec2.delete_security_group(GroupId=used)
    names = {g["GroupName"] for g in ec2.describe_security_groups()["SecurityGroups"]}
    assert names == {"default"}


# Resume


def test_the_state_survives_the_server(fake_cloud: FakeCloud, podman: FakePodman) -> None:
    ids = fake_cloud.run(2)
    image_id = make_image(fake_cloud, ids[0])
    wait_for_image(fake_cloud, image_id)
    before = [fake_cloud.describe(i)["PrivateIpAddress"] for i in ids]

    with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
        assert [resumed.state_of(i) for i in ids] == ["running", "running"]
        assert [resumed.describe(i)["PublicIpAddress"] for i in ids] == before
        (clone,) = resumed.run(ImageId=image_id)
        assert resumed.spec(clone).image == resumed.folder.images / image_id
        resumed.clients.ec2.terminate_instances(InstanceIds=ids)
        assert len(podman.state) == 1


@pytest.mark.parametrize(
    ("exit_code", "suspended", "state"),
    [
        (130, False, "terminated"),  # shut down from inside while no server watched
        (130, True, "running"),  # stopped by `local stop`
        (137, False, "running"),  # the machine went down
    ],
)
def test_resume_handles_a_node_that_ended_without_a_server(
    fake_cloud: FakeCloud, podman: FakePodman, exit_code: int, suspended: bool, state: str
) -> None:
    (instance_id,) = fake_cloud.run(InstanceInitiatedShutdownBehavior="terminate")
    name = fake_cloud.container(instance_id)
    stopped = [name] if suspended else ["spr-another"]
    with fake_cloud.application.lock:
        podman.end(name, exit_code)
        with fake_cloud.endpoint.serve(fake_cloud.folder, podman, suspended=stopped) as resumed:
            assert resumed.state_of(instance_id) == state
            assert len(podman.state) == (state == "running")


def test_a_node_that_can_not_start_again_is_stopped_with_the_reason(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    (instance_id,) = fake_cloud.run()
    with fake_cloud.application.lock:
        podman.end(fake_cloud.container(instance_id), 137)
        podman.refuse = "st"
        with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
            instance = resumed.describe(instance_id)
    assert instance["State"]["Name"] == "stopped"
    assert instance["StateReason"]["Message"] == "Server.InternalError: podman start: refused"


def test_resume_removes_containers_of_an_interrupted_launch(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    before_launch = fake_cloud.folder.snapshot.read_bytes()
    (instance_id,) = fake_cloud.run()
    fake_cloud.folder.snapshot.write_bytes(before_launch)
    with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
        assert refusal(resumed.describe, instance_id=instance_id) == "InvalidInstanceID.NotFound"
    assert podman.state == {}


def test_resume_settles_pending_images_by_their_disks(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    (instance_id,) = fake_cloud.run()
    podman.copying_allowed.clear()
    done, lost = (make_image(fake_cloud, instance_id, name) for name in ("done", "lost"))
    (fake_cloud.folder.images / done).mkdir(parents=True)
    with (
        fake_cloud.application.lock,
        fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed,
    ):
        found = resumed.clients.ec2.describe_images(Owners=["self"])["Images"]
    podman.copying_allowed.set()
    assert {i["ImageId"]: i["State"] for i in found} == {done: "available", lost: "failed"}
