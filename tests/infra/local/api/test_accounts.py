"""Accounts of the embedded cloud: one sees nothing of another, and STS says who calls."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from tests.infra.local.fakes import FakeCloud, refused

OTHER = "210987654321"


def identity(cloud: FakeCloud) -> tuple[str, str]:
    answer = cloud.clients.sts.get_caller_identity()
    return answer["Account"], answer["Arn"]


def test_sts_names_the_caller(fake_cloud: FakeCloud) -> None:
    assert identity(fake_cloud) == ("123456789012", "arn:aws:iam::123456789012:user/spr-cluster")

    fake_cloud.faults(f'account = "{OTHER}"\ncaller = "assumed-role/Admin/ann@example.com"\n')

    arn = f"arn:aws:sts::{OTHER}:assumed-role/Admin/ann@example.com"
    assert identity(fake_cloud) == (OTHER, arn)


def test_no_policy_denies_a_look_at_oneself(fake_cloud: FakeCloud) -> None:
    policy = fake_cloud.folder.root / "policy.json"
    policy.write_text('{"Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*"}]}')
    fake_cloud.faults(f'[iam]\npolicy = "{policy}"\n')

    assert identity(fake_cloud)[0] == "123456789012"
    assert refused(fake_cloud.ec2.describe_vpcs) == ("UnauthorizedOperation", 403)


def test_accounts_share_nothing(fake_cloud: FakeCloud) -> None:
    (first,) = fake_cloud.run()
    fake_cloud.faults(f'account = "{OTHER}"\n')

    assert not fake_cloud.ec2.describe_instances()["Reservations"]
    assert refused(fake_cloud.ec2.terminate_instances, InstanceIds=[first])[1] == 400
    (second,) = fake_cloud.run()
    there = fake_cloud.describe(second)
    fake_cloud.faults("")

    found = fake_cloud.ec2.describe_instances()["Reservations"]
    assert [i["InstanceId"] for each in found for i in each["Instances"]] == [first]
    # Its containers are in a network of their own.
    assert there["VpcId"] != fake_cloud.describe(first)["VpcId"]
    assert fake_cloud.spec(first).network != fake_cloud.spec(second).network
    assert there["PublicIpAddress"] == there["PrivateIpAddress"]


def test_another_accounts_resources_survive_the_server(fake_cloud: FakeCloud) -> None:
    fake_cloud.faults(f'account = "{OTHER}"\n')
    (second,) = fake_cloud.run()

    again = fake_cloud.endpoint.serve(fake_cloud.folder, fake_cloud.podman)
    with again as cloud:
        assert cloud.state_of(second) == "running"


def test_an_mfa_code_is_accepted_once(fake_cloud: FakeCloud) -> None:
    sts = fake_cloud.endpoint.client("sts")
    request = {
        "RoleArn": f"arn:aws:iam::{OTHER}:role/Admin",
        "RoleSessionName": "ann",
        "SerialNumber": "arn:aws:iam::123456789012:mfa/ann",
        "TokenCode": "123456",
    }

    assert sts.assume_role(**request)["Credentials"]["SessionToken"]
    with pytest.raises(ClientError, match="invalid MFA one time pass code"):
        sts.assume_role(**request)
