"""Missing permissions according to IAM's policy simulator, which changes nothing and is free.

The simulator evaluates the caller's policies and permissions boundary. It ignores an organization's
policies if they have conditions, and all policies of resources such as keys:
https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_testing-policies.html
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from infra.aws.clients import DENIED, unless

if TYPE_CHECKING:
    from types_boto3_iam import IAMClient

_ASSUMED = re.compile(r"arn:([\w-]+):sts::(\d+):assumed-role/([^/]+)/.*")
# The resource kinds of actions whose statement also lists other kinds.
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
_TYPES = {"Bool": "boolean", "NumericEquals": "numeric"}
# A value for condition keys that must merely exist.
_ANY_VALUE = "spr-cluster"

State = Literal["allowed", "missing", "unknown"]


@dataclass(frozen=True)
class Finding:
    """Whether the caller may perform an action; ``why`` explains any state but "allowed"."""

    action: str
    state: State
    why: str = ""


@dataclass(frozen=True)
class Principal:
    """The user or role to simulate, and the region of its calls."""

    arn: str
    region: str

    def here(self, pattern: str) -> str:
        """Fill in a resource ARN's wildcards for partition, region, and account."""
        if pattern == "*":
            return pattern
        _, partition, _, _, account, _ = self.arn.split(":", 5)
        own = ("arn", partition, "", self.region, account)
        parts = pattern.split(":", 5)
        return ":".join(
            [o if p == "*" else p for o, p in zip(own, parts, strict=False)] + parts[5:]
        )


def simulate(iam: IAMClient, principal: Principal, policy: Mapping[str, Any]) -> list[Finding]:
    """Simulate every statement of a policy. Raises ``ClientError`` without permission to simulate."""
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
    """Yield every combination of values that a condition accepts, as context entries."""
    choices = []
    # The end of EC2's name, as other policies may have it.
    end = ".cn" if region.startswith("cn-") else ""
    for operator, tests in condition.items():
        for key, values in tests.items():
            entry = {"ContextKeyName": key, "ContextKeyType": _TYPES.get(operator, "string")}
            accepted = [_ANY_VALUE] if operator == "Null" else _listed(values)
            filled = [value.replace(".*.", f".{region}.") for value in accepted]
            filled = [value.replace(".com*", f".com{end}").rstrip("*") for value in filled]
            choices.append([{**entry, "ContextKeyValues": [value]} for value in filled])
    yield from map(list, itertools.product(*choices))


def _fits(action: str, resource: str) -> bool:
    """Return whether an action involves this kind of resource."""
    kind = resource.rpartition(":")[2].partition("/")[0]
    return resource == "*" or action not in _KINDS or kind in _KINDS[action]


def _listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, list) else [value]


def find_principal(iam: IAMClient, caller: str, region: str) -> Principal:
    """Return the principal of a caller's ARN: for a session, its role."""
    match = _ASSUMED.fullmatch(caller)
    if match is None:
        return Principal(caller, region)
    partition, account, name = match.groups()
    # A session's ARN lacks its role's path, which single sign-on roles have.
    role = unless(DENIED, lambda: iam.get_role(RoleName=name)["Role"]["Arn"])
    return Principal(role or f"arn:{partition}:iam::{account}:role/{name}", region)
