"""What the embedded cloud's IAM decides on: resources, tags, keys for disks, and dry runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.infra.local.fakes import (
    BASE,
    Endpoint,
    FakeCloud,
    FakePodman,
    FakeTime,
    refusal,
    refused,
    state_folder,
    tags,
)

TAG = "spr-cluster:cluster"
OURS = {"Null": {f"aws:ResourceTag/{TAG}": "false"}}
KEY = "arn:aws:kms:us-east-1:123456789012:key/1"


@pytest.fixture
def fake_cloud(endpoint: Endpoint, tmp_path: Path, podman: FakePodman) -> Iterator[FakeCloud]:
    with endpoint.serve(state_folder(tmp_path), podman, clock=FakeTime(), saving=False) as cloud:
        yield cloud


@pytest.fixture
def put(fake_cloud: FakeCloud, tmp_path: Path) -> Any:
    """Put statements in force, and other lines of the faults file."""

    def put(*statements: dict[str, Any], more: str = "", tag_delay_s: float = 0) -> None:
        policy = tmp_path / "policy.json"
        given = [{"Effect": "Allow", "Resource": "*", **statement} for statement in statements]
        policy.write_text(json.dumps({"Statement": given}))
        iam = f'[iam]\npolicy = "{policy}"\ntag_delay_s = {tag_delay_s}\n'
        fake_cloud.faults(f"{more}\n{iam}")

    return put


def launch(cloud: FakeCloud, **changes: Any) -> Any:
    """Buy a spot machine with all that a policy can ask for."""
    kinds = ("instance", "volume", "network-interface", "spot-instances-request")
    request = {
        "ImageId": BASE.ami_id,
        "InstanceType": "c7i.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"Encrypted": True, "VolumeSize": 20}}
        ],
        "MetadataOptions": {"HttpTokens": "required"},
        "InstanceMarketOptions": {"MarketType": "spot"},
        "TagSpecifications": [tags(kind, **{TAG: "a"})[0] for kind in kinds],
    }
    return cloud.ec2.run_instances(**{k: v for k, v in {**request, **changes}.items() if v})


EC2 = "arn:aws:ec2:*:*:"
TAGGED = {"Null": {f"aws:RequestTag/{TAG}": "false"}}
RUN: dict[str, dict[str, Any]] = {
    "instance": {
        "Resource": f"{EC2}instance/*",
        "Condition": {
            **TAGGED,
            "StringEquals": {
                "ec2:InstanceType": "c7i.xlarge",
                "ec2:MetadataHttpTokens": "required",
            },
        },
    },
    "volume": {
        "Resource": f"{EC2}volume/*",
        "Condition": {**TAGGED, "Bool": {"ec2:Encrypted": "true"}},
    },
    "network-interface": {"Resource": f"{EC2}network-interface/*", "Condition": TAGGED},
    "spot-instances-request": {"Resource": f"{EC2}spot-instances-request/*", "Condition": TAGGED},
    "security-group": {"Resource": f"{EC2}security-group/*"},
    "image": {
        "Resource": "arn:aws:ec2:*::image/*",
        "Condition": {"StringEquals": {"ec2:Owner": "099720109477"}},
    },
}
TAG_NEW = {
    "Action": "ec2:CreateTags",
    "Condition": {"StringEquals": {"ec2:CreateAction": "RunInstances"}},
}


def run_statements(without: str = "") -> list[dict[str, Any]]:
    runs = [{"Action": "ec2:RunInstances", **s} for kind, s in RUN.items() if kind != without]
    return [*runs, TAG_NEW]


def test_a_launch_needs_permission_for_all_that_it_makes_and_uses(
    fake_cloud: FakeCloud, put: Any
) -> None:
    put(*run_statements())
    assert launch(fake_cloud)["Instances"]
    for kind in RUN:
        put(*run_statements(without=kind))
        with pytest.raises(ClientError, match=rf"RunInstances on resource: \S+:{kind}/"):
            launch(fake_cloud)
    put(*run_statements()[:-1])
    with pytest.raises(ClientError, match="perform: ec2:CreateTags on resource"):
        launch(fake_cloud)


@pytest.mark.parametrize(
    "change",
    [
        {"InstanceType": "c7i.metal-24xl"},
        {"MetadataOptions": None},
        {"BlockDeviceMappings": None},
        {"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"Encrypted": False}}]},
        {"TagSpecifications": None},
        {"TagSpecifications": tags("spot-instances-request", other="tag")},
    ],
)
def test_a_launch_with_one_thing_wrong_is_refused(
    fake_cloud: FakeCloud, put: Any, change: dict[str, Any]
) -> None:
    put(*run_statements())
    assert refusal(lambda: launch(fake_cloud, **change)) == "UnauthorizedOperation"
    assert fake_cloud.podman.state == {}


def test_untagged_a_spot_request_is_not_asked_about(fake_cloud: FakeCloud, put: Any) -> None:
    put(*run_statements(without="spot-instances-request"))
    kinds = ("instance", "volume", "network-interface")
    assert launch(fake_cloud, TagSpecifications=[tags(kind, **{TAG: "a"})[0] for kind in kinds])


def test_only_what_has_the_tag_can_be_changed_or_used(fake_cloud: FakeCloud, put: Any) -> None:
    ec2 = fake_cloud.ec2

    def group(name: str, **values: str) -> str:
        labels = tags("security-group", **values) if values else []
        request = {"GroupName": name, "Description": "d", "TagSpecifications": labels}
        return str(ec2.create_security_group(**request)["GroupId"])

    ours, theirs = group("ours", **{TAG: "a"}), group("theirs", other="b")
    put({"Action": ["ec2:DeleteSecurityGroup", "ec2:CreateTags"], "Condition": OURS})
    label = [{"Key": TAG, "Value": "a"}]

    assert refusal(ec2.delete_security_group, GroupId=theirs) == "UnauthorizedOperation"
    assert refusal(ec2.delete_security_group, GroupId="sg-none") == "UnauthorizedOperation"
    request = {"Resources": [ours, theirs], "Tags": label}
    assert refusal(ec2.create_tags, **request) == "UnauthorizedOperation"
    ec2.create_tags(Resources=[ours], Tags=label)
    ec2.delete_security_group(GroupId=ours)


def test_iam_sees_new_tags_late(fake_cloud: FakeCloud, put: Any) -> None:
    ec2 = fake_cloud.ec2
    labels = tags("security-group", **{TAG: "a"})
    made = ec2.create_security_group(GroupName="g", Description="d", TagSpecifications=labels)
    put({"Action": "ec2:DeleteSecurityGroup", "Condition": OURS}, tag_delay_s=5)

    assert refusal(ec2.delete_security_group, GroupId=made["GroupId"]) == "UnauthorizedOperation"
    fake_cloud.clock.sleep(6)
    ec2.delete_security_group(GroupId=made["GroupId"])


def test_parameters_and_quotas_have_their_own_resources(fake_cloud: FakeCloud, put: Any) -> None:
    client = fake_cloud.endpoint.client
    put(
        {"Action": "ssm:GetParameter", "Resource": "arn:aws:ssm:*::parameter/aws/service/*"},
        {"Action": "servicequotas:*", "Resource": "arn:aws:servicequotas:*:*:ec2/*"},
    )
    ssm, quotas = client("ssm"), client("service-quotas")
    assert refusal(ssm.get_parameter, Name="/aws/service/none") == "ParameterNotFound"
    assert refusal(ssm.get_parameter, Name="/mine") == "AccessDeniedException"
    assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-1216C47A")["Quota"]
    other = {"ServiceCode": "vpc", "QuotaCode": "L-F678F1CE"}
    assert refusal(quotas.get_service_quota, **other) == "AccessDeniedException"


@pytest.mark.parametrize(
    ("operation", "request_"),
    [
        ("create_placement_group", {"GroupName": "g", "Strategy": "cluster"}),
        ("create_security_group", {"GroupName": "g", "Description": "d"}),
        ("describe_instances", {}),
        ("release_address", {"AllocationId": "eipalloc-1"}),
        ("run_instances", {"ImageId": BASE.ami_id, "MinCount": 1, "MaxCount": 1}),
    ],
)
def test_a_dry_run_only_checks_permissions(
    fake_cloud: FakeCloud, put: Any, operation: str, request_: dict[str, Any]
) -> None:
    call = getattr(fake_cloud.ec2, operation)
    assert refused(call, **request_, DryRun=True) == ("DryRunOperation", 412)
    put()
    assert refused(call, **request_, DryRun=True) == ("UnauthorizedOperation", 403)
    fake_cloud.faults("")
    assert fake_cloud.podman.state == {}
    assert fake_cloud.ec2.describe_placement_groups()["PlacementGroups"] == []


def test_without_its_key_a_machine_ends_at_its_launch(fake_cloud: FakeCloud, put: Any) -> None:
    fault = f"[ebs]\nkms_key = '{KEY}'\n"
    put({"Action": "ec2:*"}, more=fault)

    (id_,) = fake_cloud.run()

    found = fake_cloud.describe(id_)
    assert found["State"]["Name"] == "terminated"
    reason = {
        "Code": "Client.InternalError",
        "Message": "Client.InternalError: Client error on launch",
    }
    assert found["StateReason"] == reason
    key = {"Resource": KEY}
    via = {"StringEquals": {"kms:ViaService": "ec2.us-east-1.amazonaws.com"}}
    put({"Action": "ec2:*"}, {**key, "Action": "kms:*", "Condition": via}, more=fault)
    (id_,) = fake_cloud.run()
    assert fake_cloud.state_of(id_) == "running"
    put({"Action": "ec2:*"}, {**key, "NotAction": "kms:CreateGrant"}, more=fault)
    (id_,) = fake_cloud.run()
    assert fake_cloud.state_of(id_) == "terminated"


def test_spot_needs_its_role_or_the_permission_to_create_it(
    fake_cloud: FakeCloud, put: Any
) -> None:
    spot: Any = {"InstanceMarketOptions": {"MarketType": "spot"}}
    missing = "[spot]\nservice_linked_role = false\n"
    request = {"ImageId": BASE.ami_id, "MinCount": 1, "MaxCount": 1, **spot}
    put({"Action": "ec2:*"}, more=missing)
    code = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
    assert refusal(fake_cloud.ec2.run_instances, **request) == code
    assert fake_cloud.run()
    create = {"Action": "iam:CreateServiceLinkedRole"}
    put({"Action": "ec2:*"}, create, more=missing)
    assert fake_cloud.run(**spot)
    put({"Action": "ec2:*"})
    assert fake_cloud.run(**spot)


GROUP = "arn:aws:scheduler:us-east-1:123456789012:schedule-group/a"
ROLE = "arn:aws:iam::123456789012:role/a"
MEANS = {"StringEquals": {"iam:PassedToService": "scheduler.amazonaws.com"}}
GUARD: dict[str, dict[str, Any]] = {
    "iam:CreateRole": {"Resource": ROLE, "Condition": TAGGED},
    "iam:TagRole": {"Resource": ROLE, "Condition": TAGGED},
    "scheduler:CreateScheduleGroup": {"Resource": GROUP, "Condition": TAGGED},
    "scheduler:TagResource": {"Resource": GROUP, "Condition": TAGGED},
    "scheduler:ListTagsForResource": {"Resource": GROUP},
    "scheduler:ListSchedules": {"Resource": "*"},
    "scheduler:CreateSchedule": {"Resource": f"{GROUP.replace('-group', '')}/i-1"},
    "iam:PassRole": {"Resource": ROLE, "Condition": MEANS},
    "scheduler:DeleteScheduleGroup": {"Resource": GROUP},
    "scheduler:DeleteSchedule": {"Resource": f"{GROUP.replace('-group', '')}/*"},
}


def guard(cloud: FakeCloud) -> None:
    """Make a second guard and remove it."""
    iam, scheduler = cloud.clients.iam, cloud.clients.scheduler
    labels: Any = [{"Key": TAG, "Value": "a"}]
    trust = {
        "Effect": "Allow",
        "Principal": {"Service": "scheduler.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    iam.create_role(RoleName="a", AssumeRolePolicyDocument=document, Tags=labels)
    scheduler.create_schedule_group(Name="a", Tags=labels)
    scheduler.list_tags_for_resource(ResourceArn=GROUP)
    scheduler.list_schedules(GroupName="a")
    scheduler.create_schedule(
        GroupName="a",
        Name="i-1",
        ScheduleExpression="at(2030-01-01T00:00:00)",
        FlexibleTimeWindow={"Mode": "OFF"},
        Target={"Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances", "RoleArn": ROLE},
    )
    scheduler.delete_schedule_group(Name="a")


def test_a_second_guard_needs_permission_for_all_that_it_makes_and_uses(
    fake_cloud: FakeCloud, put: Any
) -> None:
    put(*({"Action": action, **statement} for action, statement in GUARD.items()))
    guard(fake_cloud)


@pytest.mark.parametrize("missing", GUARD)
def test_a_second_guard_lacks_each_of_its_permissions(
    fake_cloud: FakeCloud, put: Any, missing: str
) -> None:
    put(*({"Action": action, **given} for action, given in GUARD.items() if action != missing))
    with pytest.raises(ClientError, match=f"to perform: {missing} on resource: "):
        guard(fake_cloud)
