"""EC2's refusals, and its calls about tags, groups, and regions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.local.fakes import FakeCloud, refusal, refused, tags

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


def test_every_resource_gets_its_tags_when_it_is_created(fake_cloud: FakeCloud) -> None:
    ec2, (instance_id,) = fake_cloud.ec2, fake_cloud.run()
    ec2.create_security_group(
        GroupName="g", Description="d", TagSpecifications=tags("security-group", cluster="c")
    )
    ec2.import_key_pair(
        KeyName="k", PublicKeyMaterial=KEY, TagSpecifications=tags("key-pair", cluster="c")
    )
    ec2.create_launch_template(
        LaunchTemplateName="template",
        LaunchTemplateData={"ImageId": "ami-1"},
        TagSpecifications=tags("launch-template", cluster="c"),
    )
    image_id = ec2.create_image(
        InstanceId=instance_id,
        Name="img",
        NoReboot=True,
        TagSpecifications=[*tags("image", cluster="c"), *tags("snapshot", cluster="c")],
    )["ImageId"]
    fake_cloud.backend.images.copies[image_id].future.result(60)
    shown = [
        *ec2.describe_security_groups(Filters=BY_TAG)["SecurityGroups"],
        *ec2.describe_key_pairs(Filters=BY_TAG)["KeyPairs"],
        *ec2.describe_launch_templates(Filters=BY_TAG)["LaunchTemplates"],
        *ec2.describe_images(Filters=BY_TAG)["Images"],
        *ec2.describe_snapshots(Filters=BY_TAG)["Snapshots"],
    ]
    assert [resource["Tags"] for resource in shown] == [MINE] * 5
    assert ec2.describe_addresses(Filters=BY_TAG)["Addresses"] == []
    ec2.delete_launch_template(LaunchTemplateName="template")
    assert ec2.describe_launch_templates(Filters=BY_TAG)["LaunchTemplates"] == []


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


def groups_of(cloud: FakeCloud, interface: str) -> list[str]:
    answer = cloud.ec2.describe_network_interfaces(NetworkInterfaceIds=[interface])
    return [g["GroupId"] for g in answer["NetworkInterfaces"][0]["Groups"]]


def test_a_machine_moves_to_another_group(fake_cloud: FakeCloud) -> None:
    ec2, (instance_id,) = fake_cloud.ec2, fake_cloud.run()
    group = ec2.create_security_group(GroupName="g", Description="d")["GroupId"]
    interface = fake_cloud.describe(instance_id)["NetworkInterfaces"][0]["NetworkInterfaceId"]
    ec2.modify_network_interface_attribute(NetworkInterfaceId=interface, Groups=[group])
    assert groups_of(fake_cloud, interface) == [group]
    assert [g["GroupId"] for g in fake_cloud.describe(instance_id)["SecurityGroups"]] == [group]
    other = ec2.create_security_group(GroupName="other", Description="d")["GroupId"]
    ec2.modify_instance_attribute(InstanceId=instance_id, Groups=[other])
    assert groups_of(fake_cloud, interface) == [other]
    ec2.delete_security_group(GroupId=group)
    assert refusal(ec2.delete_security_group, GroupId=other) == "DependencyViolation"
    ec2.modify_instance_attribute(InstanceId=instance_id, DisableApiTermination={"Value": True})
    refused = refusal(ec2.terminate_instances, InstanceIds=[instance_id])
    assert refused == "OperationNotPermitted"
    assert fake_cloud.state_of(instance_id) == "running"


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
