"""IAM policies: which requests a statement covers, and conditions that are refused when unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.errors import UsageError
from infra.local.api.policy import Policy, Request
from tests.cloud.policies import parse_known_policy

MACHINE = "arn:aws:ec2:us-east-1:123456789012:instance/i-1"
CONTEXT: dict[str, Any] = {
    "aws:PrincipalAccount": "123456789012",
    "aws:ResourceTag/team:name": "red",
    "ec2:Encrypted": "true",
    "ec2:InstanceType": "c7i.xlarge",
}


def allows(action: str = "ec2:StopInstances", resource: str = MACHINE, **statement: Any) -> bool:
    given = {"Effect": "Allow", "Action": "*", "Resource": "*", **statement}
    policy = parse_known_policy(json.dumps({"Statement": given}), "p")
    return policy.allows(Request(action, resource, CONTEXT))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ({"Action": "ec2:stopinstances"}, True),
        ({"Action": ["ec2:St?pInst*", "ec2:DescribeVpcs"]}, True),
        ({"Action": "ec2:Stop"}, False),
        ({"Resource": "arn:aws:ec2:*:*:instance/*"}, True),
        ({"Resource": ["arn:*:ec2:*:${aws:PrincipalAccount}:instance/i-1"]}, True),
        ({"Resource": "arn:aws:ec2:*:${aws:username}:instance/*"}, False),
        # A wildcard stays in its part of the ARN, and brackets are only brackets.
        ({"Resource": "arn:aws:ec2:*:instance/*"}, False),
        ({"Resource": "arn:aws:ec2:us-*:instance/i-1:x"}, False),
        ({"Resource": "arn:aws:ec2:*:*:instance/i-[1]"}, False),
    ],
)
def test_a_statement_covers_actions_and_resources(statement: Any, allowed: bool) -> None:
    assert allows(**statement) is allowed


@pytest.mark.parametrize(
    ("operator", "key", "values", "holds"),
    [
        ("StringEquals", "ec2:InstanceType", ["c7i.large", "c7i.xlarge"], True),
        ("StringEquals", "EC2:instancetype", "c7i.xlarge", True),
        ("StringEquals", "ec2:InstanceType", "c7i.*", False),
        ("StringEquals", "ec2:Owner", "amazon", False),
        ("StringLike", "ec2:InstanceType", "c7i.*", True),
        ("Bool", "ec2:Encrypted", "true", True),
        ("Bool", "ec2:Encrypted", False, False),
        ("Null", "aws:ResourceTag/team:name", "false", True),
        ("Null", "aws:ResourceTag/team:name", True, False),
        ("Null", "aws:RequestTag/team:name", "true", True),
    ],
)
def test_conditions_hold_as_in_iam(operator: str, key: str, values: Any, holds: bool) -> None:
    assert allows(Condition={operator: {key: values}}) is holds


def test_every_condition_has_to_hold_a_denial_wins_and_silence_denies() -> None:
    fits = {"ec2:InstanceType": "c7i.xlarge"}
    assert allows(Condition={"StringEquals": fits, "Bool": {"ec2:Encrypted": "true"}})
    assert not allows(Condition={"StringEquals": fits, "Bool": {"ec2:Encrypted": "false"}})
    assert not allows(Condition={"StringEquals": {**fits, "aws:ResourceTag/team:name": "blue"}})
    request = Request("ec2:StopInstances", MACHINE, {})
    every = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    deny = {"Effect": "Deny", "Action": "ec2:Stop*", "Resource": "*"}
    decisions = [Policy(each).allows(request) for each in ([every], [every, deny], [])]
    assert decisions == [True, False, False]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ({"Effect": "allow"}, "expected a Statement with its Effect, Allow or Deny"),
        ({"Resources": "*"}, "Resources; did you mean Resource?: unknown element"),
        ({"Action": None}, "a statement has no Action"),
        ({"Resource": None}, "a statement has no Resource"),
        (
            {"Condition": {"StringEqual": {"ec2:Owner": "amazon"}}},
            "unknown operator 'StringEqual'; did you mean StringEquals?",
        ),
        (
            {"Condition": {"StringEquals": {"ec2:Ownr": "amazon"}}},
            "unknown condition key 'ec2:Ownr'; did you mean ec2:Owner?",
        ),
        ({"Condition": {"DateLessThan": {"ec2:Owner": "2030"}}}, "unknown operator 'DateLessThan'"),
    ],
)
def test_what_cannot_be_judged_is_refused(statement: dict[str, Any], message: str) -> None:
    given = {"Effect": "Allow", "Action": "*", "Resource": "*", **statement}
    text = json.dumps({"Statement": [{k: v for k, v in given.items() if v is not None}]})
    with pytest.raises(UsageError) as caught:
        parse_known_policy(text, "IAM policy p.json")
    assert caught.value.message == f"IAM policy p.json: {message}"
