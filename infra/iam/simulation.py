"""What of the policy the caller lacks, by IAM's own simulator, which changes and costs nothing.

It judges the caller's policies and permissions boundary, but an organization's policies only if they
have no conditions, and the policies of resources, such as keys, not at all:
https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_testing-policies.html
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from botocore.exceptions import ClientError

from infra.aws.clients import DENIED, error_code

if TYPE_CHECKING:
    from types_boto3_iam import IAMClient

_ASSUMED = re.compile(r"arn:([\w-]+):sts::(\d+):assumed-role/([^/]+)/.*")
# Of the actions that share a statement with others.
_KINDS = {
    "ec2:CreateImage": {"image", "snapshot"},
    "ec2:CreatePlacementGroup": {"placement-group"},
    "ec2:CreateSecurityGroup": {"security-group", "vpc"},
    "ec2:ImportKeyPair": {"key-pair"},
    "ec2:RunInstances": {
        "image",
        "instance",
        "network-interface",
        "spot-instances-request",
        "subnet",
        "volume",
    },
}
# What a policy asks of a key to exist, and what a simulation passes.
_ANY_VALUE = "spr-cluster"

State = Literal["allowed", "missing", "unknown"]


@dataclass(frozen=True)
class Finding:
    """Whether the caller may do an action; ``why`` explains a state other than allowed."""

    action: str
    state: State
    why: str = ""


@dataclass(frozen=True)
class Principal:
    """Who a simulation is about, and where: an ARN's partition, region, and account."""

    arn: str
    region: str

    def here(self, pattern: str) -> str:
        """Return a policy's resource in this partition, region, and account."""
        if pattern == "*":
            return pattern
        _, partition, _, _, account, _ = self.arn.split(":", 5)
        own = ("arn", partition, "", self.region, account)
        parts = pattern.split(":", 5)
        return ":".join(
            [o if p == "*" else p for o, p in zip(own, parts, strict=False)] + parts[5:]
        )


def simulate(iam: IAMClient, principal: Principal, policy: Mapping[str, Any]) -> list[Finding]:
    """Ask IAM's simulator about every statement. Raises ``ClientError`` without the permission."""
    found = [
        finding
        for statement in policy["Statement"]
        for context in _contexts(statement.get("Condition", {}), principal.region)
        for resource in _listed(statement["Resource"])
        for finding in _ask(iam, principal, statement["Action"], resource, context)
    ]
    missing = {finding.action for finding in found if finding.state == "missing"}
    return [f for f in dict.fromkeys(found) if f.state == "missing" or f.action not in missing]


def _ask(
    iam: IAMClient,
    principal: Principal,
    actions: Sequence[str],
    resource: str,
    context: Sequence[Any],
) -> Iterator[Finding]:
    place = principal.here(resource)
    asked = [action for action in actions if _fits(action, resource)]
    if not asked:
        return
    answer = iam.simulate_principal_policy(
        PolicySourceArn=principal.arn,
        ActionNames=asked,
        ResourceArns=[place],
        ContextEntries=list(context),
    )
    values = ", ".join(f"{e['ContextKeyName']}={e['ContextKeyValues'][0]}" for e in context)
    about = f"on {place}" + (f" with {values}" if values else "")
    for result in answer["EvaluationResults"]:
        denied = result["EvalDecision"] != "allowed"
        action = result["EvalActionName"]
        yield Finding(action, "missing", about) if denied else Finding(action, "allowed")


def _contexts(condition: Mapping[str, Any], region: str) -> Iterator[list[dict[str, Any]]]:
    """Yield every combination of values that a condition accepts, as the simulator takes them."""
    choices = []
    for operator, tests in condition.items():
        for key, values in tests.items():
            kind = "boolean" if operator == "Bool" else "string"
            wanted = [_ANY_VALUE] if operator == "Null" else _listed(values)
            choices.append(
                [
                    {
                        "ContextKeyName": key,
                        "ContextKeyValues": [value.replace("*", region, 1).rstrip("*")],
                        "ContextKeyType": kind,
                    }
                    for value in wanted
                ]
            )
    yield from map(list, itertools.product(*choices))


def _fits(action: str, resource: str) -> bool:
    """Return whether AWS asks about this kind of resource for an action."""
    kind = resource.rpartition(":")[2].partition("/")[0]
    return resource == "*" or action not in _KINDS or kind in _KINDS[action]


def _listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, list) else [value]


def find_principal(iam: IAMClient, caller: str, region: str) -> Principal:
    """Return whose policies count for a caller's ARN: a session has those of its role."""
    match = _ASSUMED.fullmatch(caller)
    if match is None:
        return Principal(caller, region)
    partition, account, name = match.groups()
    try:
        # The ARN of a session lacks its role's path, as that of roles for single sign-on.
        return Principal(iam.get_role(RoleName=name)["Role"]["Arn"], region)
    except ClientError as error:
        if error_code(error) not in DENIED:
            raise
        return Principal(f"arn:{partition}:iam::{account}:role/{name}", region)
