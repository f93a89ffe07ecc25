"""How many machines a launch gets, where, and what is left of one that was refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.local.fakes import BASE, FakeCloud, FakePodman, refusal, refused


def subnet(cloud: FakeCloud, zone: str) -> str:
    filters = [{"Name": "availability-zone", "Values": [zone]}]
    return str(cloud.once.describe_subnets(Filters=filters)["Subnets"][0]["SubnetId"])


def launch(cloud: FakeCloud, least: int, most: int, **wishes: Any) -> list[str]:
    answer = cloud.once.run_instances(
        **{
            "ImageId": BASE.ami_id,
            "InstanceType": "r7iz.metal-16xl",
            "MinCount": least,
            "MaxCount": most,
            **wishes,
        }
    )
    return [instance["InstanceId"] for instance in answer["Instances"]]


def assert_nothing_is_left(cloud: FakeCloud, podman: FakePodman) -> None:
    assert podman.state == {}
    assert cloud.once.describe_instances()["Reservations"] == []
    assert cloud.once.describe_volumes()["Volumes"] == []
    assert cloud.once.describe_network_interfaces()["NetworkInterfaces"] == []
    assert cloud.once.describe_spot_instance_requests()["SpotInstanceRequests"] == []
    assert cloud.once.describe_tags()["Tags"] == []


# Capacity


def test_a_group_with_machines_is_of_their_zone(fake_cloud: FakeCloud) -> None:
    fake_cloud.once.create_placement_group(GroupName="near", Strategy="cluster")
    near: dict[str, Any] = {
        "cloud": fake_cloud,
        "least": 1,
        "most": 1,
        "Placement": {"GroupName": "near"},
    }
    ids = launch(**near, SubnetId=subnet(fake_cloud, "us-east-1a"))
    elsewhere: dict[str, Any] = {**near, "SubnetId": subnet(fake_cloud, "us-east-1b")}
    assert refusal(launch, **elsewhere) == "InvalidPlacementGroup.InUse"
    fake_cloud.once.terminate_instances(InstanceIds=ids)
    assert len(launch(**elsewhere)) == 1


def test_a_token_whose_machines_have_ended_buys_nothing_more(fake_cloud: FakeCloud) -> None:
    fake_cloud.once.terminate_instances(InstanceIds=launch(fake_cloud, 1, 1, ClientToken="spent"))
    wish: dict[str, Any] = {"cloud": fake_cloud, "least": 1, "most": 1}
    assert refusal(launch, **wish, ClientToken="spent") == "IdempotentInstanceTerminated"
    assert len(launch(**wish, ClientToken="fresh")) == 1


def test_a_full_zone_refuses_with_a_500_and_keeps_nothing(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    fake_cloud.faults("[[capacity]]\nzone = 'us-east-1a'\nfree = 2\n")
    wish = {"SubnetId": subnet(fake_cloud, "us-east-1a")}
    with_wish = {"cloud": fake_cloud, "least": 3, "most": 3, **wish}
    assert refused(launch, **with_wish) == ("InsufficientInstanceCapacity", 500)
    assert_nothing_is_left(fake_cloud, podman)
    assert len(launch(fake_cloud, 3, 3, SubnetId=subnet(fake_cloud, "us-east-1b"))) == 3
    assert len(launch(fake_cloud, 2, 2, **wish)) == 2
    assert refusal(launch, cloud=fake_cloud, least=1, most=1, **wish).startswith("Insufficient")


def test_between_least_and_most_as_many_as_fit(fake_cloud: FakeCloud) -> None:
    fake_cloud.faults("[[capacity]]\nfree = 3\n")
    ids = launch(fake_cloud, 1, 5)
    assert len(ids) == 3
    fake_cloud.once.terminate_instances(InstanceIds=ids[:2])
    assert len(launch(fake_cloud, 1, 5)) == 2


def test_the_first_rule_that_matches_decides(fake_cloud: FakeCloud) -> None:
    fake_cloud.faults(
        "[[capacity]]\ninstance_type = 'c7i.*'\nfree = 1\n"
        "[[capacity]]\ngroup = true\nfree = 2\n"
        "[[capacity]]\nmarket = 'spot'\nfree = 0\n"
    )
    fake_cloud.once.create_placement_group(GroupName="near", Strategy="cluster")
    near = {"Placement": {"GroupName": "near"}}
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    assert len(launch(fake_cloud, 1, 4)) == 4
    assert len(launch(fake_cloud, 1, 4, InstanceType="c7i.metal-24xl", **near)) == 1
    # The machine of the other rule stands in a group, too.
    assert len(launch(fake_cloud, 1, 4, **near)) == 1
    assert refusal(launch, cloud=fake_cloud, least=1, most=1, **spot).startswith("Insufficient")


def test_a_stopped_machine_needs_room_to_start(fake_cloud: FakeCloud) -> None:
    fake_cloud.faults("[[capacity]]\nfree = 1\n")
    ids = launch(fake_cloud, 1, 1)
    fake_cloud.once.stop_instances(InstanceIds=ids)
    launch(fake_cloud, 1, 1)
    assert refusal(fake_cloud.once.start_instances, InstanceIds=ids).startswith("Insufficient")
    assert fake_cloud.state_of(ids[0]) == "stopped"


def test_a_zone_that_does_not_offer_the_type(fake_cloud: FakeCloud) -> None:
    offered = fake_cloud.once.describe_instance_type_offerings(
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": ["r7iz.metal-16xl"]}],
    )["InstanceTypeOfferings"]
    zones = {f"us-east-1{letter}" for letter in "abcdef"} - {o["Location"] for o in offered}
    wish = {"SubnetId": subnet(fake_cloud, min(zones))}
    assert refused(launch, cloud=fake_cloud, least=1, most=1, **wish) == ("Unsupported", 400)


# Quotas


@pytest.mark.parametrize(
    ("market", "code"),
    [({}, "VcpuLimitExceeded"), ({"MarketType": "spot"}, "MaxSpotInstanceCountExceeded")],
)
def test_the_quota_counts_vcpus_of_what_runs(
    fake_cloud: FakeCloud, podman: FakePodman, market: dict[str, str], code: str
) -> None:
    fake_cloud.faults("[quota]\non_demand_vcpus = 192\nspot_vcpus = 192\n")
    wish = {"InstanceMarketOptions": market} if market else {}
    assert refused(launch, cloud=fake_cloud, least=4, most=4, **wish) == (code, 400)
    assert_nothing_is_left(fake_cloud, podman)
    ids = launch(fake_cloud, 1, 4, **wish)
    assert len(ids) == 3
    assert refusal(launch, cloud=fake_cloud, least=1, most=1, **wish) == code
    fake_cloud.once.terminate_instances(InstanceIds=ids)
    assert len(launch(fake_cloud, 3, 3, **wish)) == 3


def test_service_quotas_answer_what_is_in_force(fake_cloud: FakeCloud) -> None:
    quotas = fake_cloud.endpoint.client("service-quotas")
    values = []
    for text in ("", "[quota]\non_demand_vcpus = 256\nspot_vcpus = 0\n"):
        fake_cloud.faults(text)
        for code in ("L-1216C47A", "L-34B43A08"):
            quota = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
            values.append(quota["Value"])
    assert values == [4096, 4096, 256, 0]
    unknown = {"ServiceCode": "ec2", "QuotaCode": "L-0"}
    assert refusal(quotas.get_service_quota, **unknown) == "NoSuchResourceException"


# The same request again


def test_a_token_gives_the_same_machines_as_they_are_now(fake_cloud: FakeCloud) -> None:
    wish: dict[str, Any] = {"ClientToken": "again", "KeyName": None}
    wish.pop("KeyName")
    first = launch(fake_cloud, 2, 2, **wish)
    assert launch(fake_cloud, 2, 2, **wish) == first
    fake_cloud.once.terminate_instances(InstanceIds=first[:1])
    request = {"ImageId": BASE.ami_id, "InstanceType": "r7iz.metal-16xl", **wish}
    again = fake_cloud.once.run_instances(MinCount=2, MaxCount=2, **request)["Instances"]
    assert [i["State"]["Name"] for i in again] == ["terminated", "running"]
    assert [i["InstanceId"] for i in again] == first


def test_a_token_is_for_one_request(fake_cloud: FakeCloud) -> None:
    launch(fake_cloud, 1, 1, ClientToken="once")
    for other in ({"most": 2}, {"InstanceType": "c7i.metal-24xl"}, {"UserData": "#!/bin/sh"}):
        wish: dict[str, Any] = {"least": 1, "most": 1, "ClientToken": "once", **other}
        answer = refused(launch, cloud=fake_cloud, **wish)
        assert answer == ("IdempotentParameterMismatch", 400)
    assert len(fake_cloud.once.describe_instances()["Reservations"]) == 1


def test_a_token_survives_the_server_and_not_a_refusal(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    fake_cloud.faults("[[capacity]]\nfree = 0\n")
    assert refusal(launch, cloud=fake_cloud, least=1, most=1, ClientToken="t").startswith("Insuff")
    fake_cloud.faults("")
    first = launch(fake_cloud, 1, 1, ClientToken="t")
    with fake_cloud.endpoint.serve(fake_cloud.folder, podman) as resumed:
        assert launch(resumed, 1, 1, ClientToken="t") == first


# What moto leaves out


def test_the_root_volume_is_as_large_as_the_image_or_larger(fake_cloud: FakeCloud) -> None:
    def root(size_gib: int = 0) -> Any:
        mapping = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": size_gib}}
        wish = {"BlockDeviceMappings": [mapping]} if size_gib else {}
        ids = launch(fake_cloud, 1, 1, **wish)
        ebs = fake_cloud.describe(ids[0])["BlockDeviceMappings"][0]["Ebs"]
        volume = fake_cloud.once.describe_volumes(VolumeIds=[ebs["VolumeId"]])["Volumes"][0]
        return volume["Size"], ebs["DeleteOnTermination"]

    assert [root(20), root()] == [(20, True), (8, True)]
    assert refusal(root, size_gib=4) == "InvalidBlockDeviceMapping"


def test_what_moto_does_not_know_is_ignored(fake_cloud: FakeCloud) -> None:
    interface = {
        "DeviceIndex": 0,
        "AssociatePublicIpAddress": True,
        "EnaSrdSpecification": {"EnaSrdEnabled": True, "EnaSrdUdpSpecification": {}},
    }
    assert launch(fake_cloud, 1, 1, NetworkInterfaces=[interface])


def test_a_group_that_is_not_there_is_refused_and_not_made(fake_cloud: FakeCloud) -> None:
    interface = {"DeviceIndex": 0, "Groups": ["sg-0123"]}
    for wish in ({"NetworkInterfaces": [interface]}, {"SecurityGroupIds": ["sg-0123"]}):
        code = refusal(launch, cloud=fake_cloud, least=1, most=1, **wish)
        assert code == "InvalidGroup.NotFound"
    assert len(fake_cloud.once.describe_security_groups()["SecurityGroups"]) == 1
