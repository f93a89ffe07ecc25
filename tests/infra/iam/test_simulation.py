"""The check of permissions by IAM's simulator, which is played by the embedded cloud's judge."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.iam.policy import build_policy
from infra.iam.simulation import Finding, Principal, find_principal, simulate
from infra.local.api.policy import Policy, Request
from infra.s3_url import parse_s3_url

ROLE = "arn:aws:iam::123456789012:role/path/work"
SESSION = "arn:aws:sts::123456789012:assumed-role/work/me@example.org"
KEY = "arn:aws:kms:us-east-1:123456789012:key/0123"


# The service that owns what another service acts on.
_OWNER = {"ec2-instance-connect": "ec2", "ssm:StartSession": "ec2", "ssmmessages": "ssm"}


class Simulator:
    """IAM with one role, which has a policy."""

    def __init__(self, policy: dict[str, Any], code: str = "") -> None:
        self.policy, self.code = Policy(policy["Statement"]), code

    def get_role(self, **request: str) -> dict[str, Any]:
        if self.code:
            raise ClientError({"Error": {"Code": self.code, "Message": "no"}}, "GetRole")
        assert request == {"RoleName": "work"}
        return {"Role": {"Arn": ROLE}}

    def simulate_principal_policy(self, **request: Any) -> dict[str, Any]:
        actions, (resource,) = request["ActionNames"], request["ResourceArns"]
        assert request["PolicySourceArn"] == ROLE
        assert resource == "*" or ":*:*" not in resource
        # For another kind of resource, IAM's answer would be a denial.
        kind = resource.rpartition(":")[2].partition("/")[0]
        for action in actions if resource != "*" else ():
            service, _, operation = action.partition(":")
            assert resource.split(":")[2] in (_OWNER.get(service, service), _OWNER.get(action))
            assert service != "scheduler" or (kind == "schedule") == operation.endswith("Schedule")
        entries = request["ContextEntries"]
        types = {e["ContextKeyName"]: e["ContextKeyType"] for e in entries}
        assert types.get("ec2-instance-connect:remotePort", "numeric") == "numeric"
        context = {e["ContextKeyName"]: e["ContextKeyValues"][0] for e in entries}
        answers = [self.policy.allows(Request(action, resource, context)) for action in actions]
        decisions = ["allowed" if answer else "implicitDeny" for answer in answers]
        return {
            "EvaluationResults": [
                {"EvalActionName": action, "EvalDecision": decision}
                for action, decision in zip(actions, decisions, strict=True)
            ]
        }


FULL = build_policy(parse_s3_url("s3://models/squad"), kms_key=KEY, second_guard=True, jump="ssm")
TUNNEL = build_policy(jump="eice")


def missing(allowed: dict[str, Any], wanted: dict[str, Any]) -> list[Finding]:
    simulator: Any = Simulator(allowed)
    found = simulate(simulator, Principal(ROLE, "eu-west-1"), wanted)
    return [finding for finding in found if finding.state == "missing"]


def test_with_the_printed_policy_nothing_is_missing() -> None:
    assert missing(FULL, FULL) == []
    everything = {"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    assert missing(everything, FULL) == []
    assert missing(TUNNEL, TUNNEL) == []
    (finding,) = missing(build_policy(), TUNNEL)
    assert finding.action == "ec2-instance-connect:OpenTunnel"
    wanted = build_policy(instance_types=["c7i.xlarge", "c8i.metal-96xl"])
    (finding,) = missing(build_policy(instance_types=["c7i.xlarge"]), wanted)
    assert finding.action == "ec2:RunInstances"
    assert "ec2:InstanceType=c8i.metal-96xl" in finding.why


@pytest.mark.parametrize(
    ("without", "needed"),
    [
        ("ec2:DescribeImages", "on *"),
        ("ec2:ImportKeyPair", "on arn:aws:ec2:eu-west-1:123456789012:key-pair/spr-cluster-*"),
        ("kms:CreateGrant", f"on {KEY} with kms:ViaService=ec2.eu-west-1.amazonaws.com"),
        ("ssm:ResumeSession", "on arn:aws:ssm:eu-west-1:123456789012:session/*"),
        ("s3:PutObject", "on arn:aws:s3:::models/squad/*"),
        ("s3:AbortMultipartUpload", "on arn:aws:s3:::models/squad/*"),
    ],
)
def test_a_missing_action_is_named_with_its_resource(without: str, needed: str) -> None:
    allowed = [
        {**s, "Action": [action for action in s["Action"] if action != without]}
        for s in FULL["Statement"]
    ]
    (finding,) = missing({"Statement": allowed}, FULL)
    assert finding.action == without
    assert finding.why.startswith(needed)


def test_in_china_ec2_is_asked_about_by_its_name_there() -> None:
    """The user's own policy may name it exactly."""
    wanted = build_policy(bucket=parse_s3_url("s3://models"), second_guard=True)

    def look(region: str, ec2: str) -> list[str]:
        allowed = json.loads(json.dumps(wanted).replace("ec2.amazonaws.com*", ec2))
        simulator: Any = Simulator(allowed)
        found = simulate(simulator, Principal(ROLE, region), wanted)
        return [finding.action for finding in found if finding.state == "missing"]

    assert look("cn-north-1", "ec2.amazonaws.com.cn") == []
    assert look("cn-north-1", "ec2.amazonaws.com") == ["iam:PassRole"]
    assert look("eu-west-1", "ec2.amazonaws.com") == []


def test_a_session_has_the_permissions_of_its_role() -> None:
    def principal(caller: str, code: str = "") -> str:
        simulator: Any = Simulator(FULL, code)
        return find_principal(simulator, caller, "eu-west-1").arn

    assert principal(SESSION) == ROLE
    assert principal(SESSION, "AccessDenied") == "arn:aws:iam::123456789012:role/work"
    user = "arn:aws:iam::123456789012:user/me"
    assert principal(user, "Never") == user
    with pytest.raises(ClientError, match="Throttling"):
        principal(SESSION, "Throttling")
