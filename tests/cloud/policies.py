"""IAM policies that name only what the evaluation knows: it would silently ignore anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.errors import UsageError
from infra.local.api.policy import OPERATORS, Policy, is_like, parse_policy
from infra.words import nearest

_ELEMENTS = {"Sid", "Effect", "Action", "Resource", "Condition"}
# The keys that a request has.
_KEYS = (
    "aws:PrincipalAccount",
    "aws:RequestTag/*",
    "aws:ResourceTag/*",
    "aws:TagKeys",
    "ec2:CreateAction",
    "ec2:Encrypted",
    "ec2:InstanceMarketType",
    "ec2:InstanceType",
    "ec2:MetadataHttpTokens",
    "ec2:Owner",
    "ec2:Region",
    "iam:AWSServiceName",
    "iam:PassedToService",
    "iam:PermissionsBoundary",
    "kms:GrantIsForAWSResource",
    "kms:ViaService",
    "s3:prefix",
)


def parse_known_policy(text: str, source: str) -> Policy:
    """Parse a policy. Raises :class:`UsageError` for unknown operators and condition keys."""
    policy = parse_policy(text, source)
    for statement in policy.statements:
        _check(statement, source)
    return policy


def _check(statement: Mapping[str, Any], source: str) -> None:
    for element in statement.keys() - _ELEMENTS:
        raise UsageError(f"{source}: {element}{nearest(element, _ELEMENTS)}: unknown element")
    if statement.get("Effect") not in ("Allow", "Deny"):
        raise UsageError(f"{source}: expected a Statement with its Effect, Allow or Deny")
    for element in ("Action", "Resource"):
        if element not in statement:
            raise UsageError(f"{source}: a statement has no {element}")
    for operator, tests in statement.get("Condition", {}).items():
        if operator not in OPERATORS:
            near = nearest(operator, OPERATORS)
            raise UsageError(f"{source}: unknown operator {operator!r}{near}")
        for key in tests:
            if not any(is_like(pattern.lower(), key.lower()) for pattern in _KEYS):
                raise UsageError(f"{source}: unknown condition key {key!r}{nearest(key, _KEYS)}")
