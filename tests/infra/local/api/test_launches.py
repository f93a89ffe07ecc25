"""Launches: how many machines they get, where, and what a refused launch leaves."""

from __future__ import annotations

from typing import Any

from infra.ec2.instances import Instance
from tests.infra.local.fakes import BASE, FakeCloud, FakePodman, refusal, refused


def subnet(cloud: FakeCloud, zone: str) -> str:
    filters = [{"Name": "availability-zone", "Values": [zone]}]
    return str(cloud.ec2.describe_subnets(Filters=filters)["Subnets"][0]["SubnetId"])


def launch(cloud: FakeCloud, least: int = 1, most: int = 1, **parameters: Any) -> list[str]:
    request = {"ImageId": BASE.ami_id, "InstanceType": "r7iz.metal-16xl", **parameters}
    answer = cloud.ec2.run_instances(MinCount=least, MaxCount=most, **request)
    return [instance["InstanceId"] for instance in answer["Instances"]]


# Capacity


def test_a_group_with_machines_is_bound_to_their_zone(fake_cloud: FakeCloud) -> None:
    fake_cloud.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    near: dict[str, Any] = {"cloud": fake_cloud, "Placement": {"GroupName": "near"}}
    ids = launch(**near, SubnetId=subnet(fake_cloud, "us-east-1a"))
    elsewhere: dict[str, Any] = {**near, "SubnetId": subnet(fake_cloud, "us-east-1b")}
    assert refusal(launch, **elsewhere) == "InvalidPlacementGroup.InUse"
    fake_cloud.ec2.terminate_instances(InstanceIds=ids)
    assert len(launch(**elsewhere)) == 1


# Repeated requests


def test_a_repeated_token_returns_the_same_machines_in_their_current_state(
    fake_cloud: FakeCloud,
) -> None:
    request: dict[str, Any] = {"cloud": fake_cloud, "least": 2, "most": 2, "ClientToken": "again"}
    first = launch(**request)
    assert launch(**request) == first
    fake_cloud.ec2.terminate_instances(InstanceIds=first[:1])
    assert launch(**request) == first
    assert [fake_cloud.state_of(i) for i in first] == ["terminated", "running"]
    for other in ({"most": 3}, {"InstanceType": "c7i.metal-24xl"}, {"UserData": "#!/bin/sh"}):
        answer = refused(launch, **{**request, **other})
        assert answer == ("IdempotentParameterMismatch", 400)
    assert len(fake_cloud.ec2.describe_instances()["Reservations"]) == 1
    fake_cloud.ec2.terminate_instances(InstanceIds=first[1:])
    assert refusal(launch, **request) == "IdempotentInstanceTerminated"
    assert len(launch(**{**request, "ClientToken": "fresh"})) == 2


def test_a_token_survives_the_server_but_not_a_refusal(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    fake_cloud.faults("[[capacity]]\nfree = 0\n")
    assert refusal(launch, cloud=fake_cloud, ClientToken="t").startswith("Insuff")
    fake_cloud.faults("")
    first = launch(fake_cloud, ClientToken="t")
    with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
        assert launch(resumed, ClientToken="t") == first


# What moto leaves out


def test_the_root_volume_is_as_large_as_the_image_or_larger(fake_cloud: FakeCloud) -> None:
    def root(size_gib: int = 0) -> Any:
        mapping = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": size_gib}}
        request: Any = {"BlockDeviceMappings": [mapping]} if size_gib else {}
        ids = launch(fake_cloud, **request)
        ebs = fake_cloud.describe(ids[0])["BlockDeviceMappings"][0]["Ebs"]
        volume = fake_cloud.ec2.describe_volumes(VolumeIds=[ebs["VolumeId"]])["Volumes"][0]
        return volume["Size"], ebs["DeleteOnTermination"]

    assert [root(20), root()] == [(20, True), (8, True)]
    assert refusal(root, size_gib=4) == "InvalidBlockDeviceMapping"


def test_a_missing_group_is_refused_and_not_created(fake_cloud: FakeCloud) -> None:
    interface = {"DeviceIndex": 0, "Groups": ["sg-0123"]}
    for request in ({"NetworkInterfaces": [interface]}, {"SecurityGroupIds": ["sg-0123"]}):
        code = refusal(launch, cloud=fake_cloud, **request)
        assert code == "InvalidGroup.NotFound"
    assert len(fake_cloud.ec2.describe_security_groups()["SecurityGroups"]) == 1


def test_an_interface_shows_whether_it_has_ena_express(fake_cloud: FakeCloud) -> None:
    for more in ({"EnaSrdSpecification": {"EnaSrdEnabled": True}}, {}):
        (instance_id,) = fake_cloud.run(NetworkInterfaces=[{"DeviceIndex": 0, **more}])
        described = fake_cloud.describe(instance_id)
        attachment = described["NetworkInterfaces"][0]["Attachment"]
        assert attachment.get("EnaSrdSpecification") == more.get("EnaSrdSpecification")
        assert Instance.from_aws(described).ena_express == bool(more)


def test_the_speed_of_a_disk_has_gp3s_limits_and_a_zone_its_types(fake_cloud: FakeCloud) -> None:
    for ebs, accepted in (
        ({"Iops": 16000, "Throughput": 1000}, True),
        ({"Iops": 80000}, False),  # 500 per GiB
        ({"Throughput": 1000}, False),  # a quarter of the IOPS, which are 3000
        ({"Iops": 2999}, False),
        ({"VolumeInitializationRate": 300}, True),
        ({"VolumeInitializationRate": 301}, False),
    ):
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "VolumeType": "gp3", **ebs}}
        if accepted:
            assert launch(fake_cloud, BlockDeviceMappings=[disk])
        else:
            code = refusal(launch, cloud=fake_cloud, BlockDeviceMappings=[disk])
            assert code == "InvalidParameterValue"
    offered = fake_cloud.ec2.describe_instance_type_offerings(
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": ["r7iz.metal-16xl"]}],
    )["InstanceTypeOfferings"]
    zones = {f"us-east-1{letter}" for letter in "abcdef"} - {o["Location"] for o in offered}
    request = {"SubnetId": subnet(fake_cloud, min(zones))}
    assert refused(launch, cloud=fake_cloud, **request) == ("Unsupported", 400)
