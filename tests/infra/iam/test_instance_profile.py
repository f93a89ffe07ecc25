"""The nodes' role: whom it trusts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from infra.aws.caller import Caller
from infra.iam.instance_profile import ClusterProfile
from infra.iam.policy import build_policy
from infra.local.api.policy import Policy, Request
from infra.s3_url import parse_s3_url
from tests.infra.plan_inputs import make_spec


@pytest.mark.parametrize(
    ("partition", "region", "service"),
    [
        ("aws", "us-east-1", "ec2.amazonaws.com"),
        ("aws-us-gov", "us-gov-west-1", "ec2.amazonaws.com"),
        ("aws-cn", "cn-north-1", "ec2.amazonaws.com.cn"),
    ],
)
def test_machines_of_every_partition_may_have_the_role(
    partition: str, region: str, service: str
) -> None:
    iam = MagicMock()
    clients: Any = SimpleNamespace(
        iam=iam,
        ec2=SimpleNamespace(meta=SimpleNamespace(region_name=region)),
        caller=Caller("1", f"arn:{partition}:iam::1:user/ann"),
    )

    ClusterProfile(clients, "bert").make(make_spec(bucket="s3://results/bert"))

    (request,) = [call.kwargs for call in iam.create_role.call_args_list]
    assert f'"Service": "{service}"' in request["AssumeRolePolicyDocument"]
    role = f"arn:{partition}:iam::1:role/{request['RoleName']}"
    policy = Policy(build_policy(bucket=parse_s3_url("s3://results/bert"))["Statement"])
    for passed, is_allowed in ((service, True), ("lambda.amazonaws.com", False)):
        keys = {"iam:PassedToService": passed}
        assert policy.allows(Request("iam:PassRole", role, keys)) is is_allowed
