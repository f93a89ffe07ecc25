"""EC2's refusals, and its calls about tags, groups, and regions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.local.fakes import FakeCloud, refusal, refused

KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPA3V5QSfvN5E5K9gkK0dqGyBQ8zGk2eSMJ0yHIE3uEh me"
MINE = [{"Key": "cluster", "Value": "c"}]
BY_TAG: Any = [{"Name": "tag:cluster", "Values": ["c"]}]


def test_duplicate_names_are_refused(fake_cloud: FakeCloud) -> None:
    ec2, (instance_id,) = fake_cloud.ec2, fake_cloud.run()
    for call, request, code in (
        (ec2.create_security_group, {"GroupName": "g", "Description": "d"}, "InvalidGroup"),
        (ec2.import_key_pair, {"KeyName": "k", "PublicKeyMaterial": KEY}, "InvalidKeyPair"),
        (
            ec2.create_image,
            {"InstanceId": instance_id, "Name": "img", "NoReboot": True},
            "InvalidAMIName",
        ),
    ):
        call(**request)
        assert refusal(call, **request) == f"{code}.Duplicate"
    (image,) = ec2.describe_images(Owners=["self"])["Images"]
    fake_cloud.backend.images.finish_copies()
    ec2.deregister_image(ImageId=image["ImageId"])
    assert ec2.create_image(InstanceId=instance_id, Name="img", NoReboot=True)["ImageId"]


@pytest.mark.breaks_contract("CreateImage request Name: 129 is outside its limits")
def test_names_that_no_image_can_have_are_refused(fake_cloud: FakeCloud) -> None:
    create, (instance_id,) = fake_cloud.ec2.create_image, fake_cloud.run()
    for name in ("a!b", "x" * 129):
        refused = refusal(create, InstanceId=instance_id, Name=name, NoReboot=True)
        assert refused == "InvalidAMIName.Malformed"


def test_pages_of_fewer_than_five_instances_are_refused(fake_cloud: FakeCloud) -> None:
    describe = fake_cloud.ec2.describe_instances
    assert refusal(describe, MaxResults=4) == "InvalidParameterValue"
    assert describe(MaxResults=5)["Reservations"] == []


@pytest.mark.parametrize(
    ("resource", "code"),
    [
        ("i-0123456789abcdef0", "InvalidInstanceID.NotFound"),
        ("ami-0123456789abcdef0", "InvalidAMIID.NotFound"),
        ("snap-0123456789abcdef0", "InvalidSnapshot.NotFound"),
    ],
)
def test_tags_on_missing_resources_are_refused(
    fake_cloud: FakeCloud, resource: str, code: str
) -> None:
    ids = fake_cloud.run()
    fake_cloud.ec2.create_tags(Resources=ids, Tags=MINE)
    assert fake_cloud.describe(ids[0])["Tags"] == MINE
    assert refusal(fake_cloud.ec2.create_tags, Resources=[*ids, resource], Tags=MINE) == code


@pytest.mark.parametrize("is_default", [True, False])
def test_a_rule_is_not_revoked_under_another_description(
    fake_cloud: FakeCloud, is_default: bool
) -> None:
    ec2 = fake_cloud.ec2
    vpc = {} if is_default else {"VpcId": ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]}
    group = ec2.create_security_group(GroupName="g", Description="d", **vpc)["GroupId"]

    def ssh(**described: str) -> Any:
        ranges = [{"CidrIp": "203.0.113.7/32", **described}]
        return [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": ranges}]

    def shown() -> Any:
        return ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]

    def revoke(**described: str) -> None:
        call = ec2.revoke_security_group_ingress
        if is_default:
            call(GroupId=group, IpPermissions=ssh(**described))
        else:
            refused = refusal(call, GroupId=group, IpPermissions=ssh(**described))
            assert refused == "InvalidPermission.NotFound"

    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=ssh(Description="mine"))
    revoke(Description="another")
    assert shown()
    ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=ssh())
    assert not shown()
    revoke()


@pytest.mark.parametrize(("seconds", "code"), [(59, True), (432_001, True), (86_400, False)])
def test_the_tracking_of_idle_connections_has_a_range(
    fake_cloud: FakeCloud, seconds: int, code: bool
) -> None:
    subnet = fake_cloud.ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    tracking = {"TcpEstablishedTimeout": seconds}
    nic = {"DeviceIndex": 0, "SubnetId": subnet, "ConnectionTrackingSpecification": tracking}
    image = fake_cloud.ec2.describe_images()["Images"][0]["ImageId"]
    request = {"ImageId": image, "InstanceType": "c8i.metal-48xl", "MinCount": 1, "MaxCount": 1}

    if code:
        refused = refusal(fake_cloud.ec2.run_instances, **request, NetworkInterfaces=[nic])
        assert refused == "InvalidParameterValue"
    else:
        assert fake_cloud.ec2.run_instances(**request, NetworkInterfaces=[nic])["Instances"]


@pytest.mark.breaks_contract("Describe* request Filters: no filter 'colour'")
@pytest.mark.parametrize(
    "action", ["instances", "subnets", "images", "placement_groups", "volumes", "tags"]
)
def test_filters_that_do_not_exist_are_refused(fake_cloud: FakeCloud, action: str) -> None:
    call = getattr(fake_cloud.ec2, f"describe_{action}")
    filters = [{"Name": "colour", "Values": ["red"]}]
    assert refused(call, Filters=filters) == ("InvalidParameterValue", 400)
