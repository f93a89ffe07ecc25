"""EC2's refusals, and its calls about tags, groups, and regions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.local.fakes import FakeCloud, refusal

KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPA3V5QSfvN5E5K9gkK0dqGyBQ8zGk2eSMJ0yHIE3uEh me"
MINE = [{"Key": "cluster", "Value": "c"}]


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


def test_tags_on_missing_resources_are_refused(fake_cloud: FakeCloud) -> None:
    ids = fake_cloud.run()
    fake_cloud.ec2.create_tags(Resources=ids, Tags=MINE)
    assert fake_cloud.describe(ids[0])["Tags"] == MINE
    for prefix, kind in (("i", "Instance"), ("ami", "AMI"), ("snap", "Snapshot")):
        code = refusal(fake_cloud.ec2.create_tags, Resources=[*ids, f"{prefix}-0123"], Tags=MINE)
        assert code.lower().startswith(f"invalid{kind}".lower())


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


def test_the_tracking_of_idle_connections_has_a_range(fake_cloud: FakeCloud) -> None:
    for seconds, is_valid in ((59, False), (432_001, False), (86_400, True)):
        tracking = {"TcpEstablishedTimeout": seconds}
        nic = {"DeviceIndex": 0, "ConnectionTrackingSpecification": tracking}
        request: Any = {"InstanceType": "c8i.metal-48xl", "NetworkInterfaces": [nic]}
        if is_valid:
            assert fake_cloud.run(**request)
        else:
            assert refusal(fake_cloud.run, **request) == "InvalidParameterValue"
