"""Missing permissions, found by dry runs: EC2 checks the permissions for a call without executing it.

The dry runs call the same functions as the commands, so their parameters are the real ones.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from botocore import xform_name
from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.clients import DENIED, Clients, error_code, unless
from infra.cost.quotas import ON_DEMAND_QUOTA
from infra.ec2 import images, inventory, key_pair, network, tags
from infra.ec2.images import RELEASES, ubuntu_parameter
from infra.ec2.instances import label_instances
from infra.ec2.network import Network
from infra.ec2.purchase import ON_DEMAND, SPOT, Offer, Purchase, render_request
from infra.ec2.routes import HOST_MANAGEMENT
from infra.errors import CloudError, SprError
from infra.iam.simulation import Finding, find_principal, simulate
from infra.instance_types import InstanceType
from infra.plan.planner import plan_down
from infra.plan.removal import remove
from infra.spec import build_spec

_NO_POLICY = {"AWSOrganizationsNotInUseException", "EffectivePolicyNotFoundException"}


def describe_tag_rules(clients: Clients) -> dict[str, Any]:
    """Return the organization's tag rules for this account, by lowercase tag key."""
    describe = partial(clients.organizations.describe_effective_policy, PolicyType="TAG_POLICY")
    answer: Any = unless(_NO_POLICY, describe)
    policy = json.loads(answer["EffectivePolicy"]["PolicyContent"]) if answer else {}
    rules: dict[str, Any] = policy.get("tags", {})
    return rules


def find_tag_conflicts(
    rules: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]
) -> list[str]:
    """Describe which of these tags the rules forbid on EC2 resources."""
    found = []
    for key, value in labels.items():
        rule = rules.get(key.lower(), {})
        if not any(each.startswith("ec2:") for each in rule.get("enforced_for", [])):
            continue
        values = rule.get("tag_value", ["*"])
        if rule.get("tag_key", key) != key:
            found.append(f"the tag {key} must be {rule['tag_key']}")
        elif not any(fnmatch.fnmatchcase(value, each) for each in values):
            found.append(f"the tag {key} is {value} but must be {' or '.join(values)}")
    return found


_NAME = "check"
_NOWHERE = "192.0.2.1/32"
# Before the first cluster, only the default group exists, and the policy excludes it.
_NO_GROUP, _DEFAULT_GROUP = "in the default group", ":security-group/"
_NOTHING = "no resource of this tool to try it on"
_DENIED_ON = re.compile(r"not authorized to perform: (\S+) on resource: (\S+)")
# Reads of other services than EC2, with their parameters.
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "iam:ListInstanceProfiles": {"MaxItems": 1},
    "pricing:GetProducts": {"ServiceCode": "AmazonEC2", "MaxResults": 1},
    "scheduler:ListScheduleGroups": {},
    "scheduler:ListSchedules": {},
    "servicequotas:GetServiceQuota": {"ServiceCode": "ec2", "QuotaCode": ON_DEMAND_QUOTA},
    "ssm:GetServiceSetting": {"SettingId": HOST_MANAGEMENT},
    "ssm:GetParameter": {"Name": ubuntu_parameter(max(RELEASES))},
}
Trials = Iterator[tuple[str, Callable[[], object]]]


def judge(clients: Clients, policy: Mapping[str, Any]) -> tuple[str, list[Finding]]:
    """Check each action of a policy with IAM's simulator, or with dry runs if that is not permitted.

    Returns the method's name and the findings.
    """
    try:
        principal = find_principal(clients.iam, clients.caller.arn, clients.ec2.meta.region_name)
        return "simulation", simulate(clients.iam, principal, policy)
    except ClientError as error:
        if error_code(error) not in (*DENIED, "NoSuchEntity", "InvalidInput"):
            raise
    return "dry runs", try_dry(clients, policy)


def try_dry(clients: Clients, policy: Mapping[str, Any]) -> list[Finding]:
    """Try every action of a policy that can be tried without creating anything."""
    findings = [_try(detail, call) for detail, call in _trials(clients, policy)]
    tried = {finding.action.partition(" ")[0] for finding in findings}
    for action in dict.fromkeys(a for s in policy["Statement"] for a in s["Action"]):
        if action not in tried:
            ours = action.startswith("ec2:")
            why = _NOTHING if ours else "it has no dry run"
            findings.append(Finding(action, "unknown", why))
    return list(dict.fromkeys(findings))


def _try(detail: str, call: Callable[[], object]) -> Finding:
    """Make a call; ``detail`` is its IAM action, or a suffix to the name of the operation called."""
    try:
        call()
    except ClientError as error:
        code, message = error_code(error), str(error.response["Error"].get("Message", ""))
        named = detail if ":" in detail else f"ec2:{error.operation_name} {detail}".rstrip()
        message = message.partition("Encoded authorization")[0].strip()
        if about := _DENIED_ON.search(message):
            message = f"{about[1]} on {about[2]}"
        if code == "DryRunOperation":
            return Finding(named, "allowed")
        excluded = code in DENIED and detail.endswith(_NO_GROUP) and _DEFAULT_GROUP in message
        if excluded:
            return Finding(named, "unknown", _NOTHING)
        if code in DENIED:
            return Finding(named, "missing", message)
        return Finding(named, "unknown", f"{code}: {message}")
    except (BotoCoreError, SprError) as error:
        return Finding(detail, "unknown", str(error))
    return Finding(detail, "allowed")


def _trials(clients: Clients, policy: Mapping[str, Any]) -> Trials:
    ec2, dry = clients.ec2, clients.dry
    for action in (a for s in policy["Statement"] for a in s["Action"]):
        service, _, operation = action.partition(":")
        if service == "ec2" and operation.startswith(("Describe", "GetAllowed", "GetEbs")):
            yield action, getattr(dry, xform_name(operation))
        elif action == "organizations:DescribeEffectivePolicy":
            yield action, partial(describe_tag_rules, clients)
        elif action in _PLAIN:
            client = clients.quotas if service == "servicequotas" else getattr(clients, service)
            yield action, partial(getattr(client, xform_name(operation)), **_PLAIN[action])
    try:
        found = inventory.describe_inventories(ec2)
        networks = network.describe_networks(ec2, (), None)
        image = images.find_ubuntu_image(clients.ssm, ec2, max(RELEASES))
    except CloudError:
        return  # the region lacks the image, or the account hides it
    except ClientError as error:
        if error_code(error) not in DENIED:
            raise
        return  # the Describe calls above report which
    for place in networks[:1]:
        public = key_pair.generate_key_pair(_NAME).public
        yield "", partial(network.create_security_group, dry, _NAME, place.vpc_id, {})
        yield "", partial(network.create_placement_group, dry, _NAME, {})
        yield "", partial(key_pair.import_key_pair, dry, _NAME, public, {})
        groups = [g for i in found.values() for g in i.security_groups if g.vpc_id == place.vpc_id]
        request = partial(_render_purchase, place, image, groups[0].id if groups else "")
        types = _types(policy)
        for name, market in [(name, ON_DEMAND) for name in types] + [(n, SPOT) for n in types[:1]]:
            buy = partial(dry.run_instances, **request(name, market))
            yield f"of {name}, {market}" + ("" if groups else f", {_NO_GROUP}"), buy
    for listed in found.values():
        yield from _uses(clients, listed)
        # Plan separately, because a plan with machines omits the resources that they use.
        for part in (inventory.Inventory(instances=listed.alive), replace(listed, instances=())):
            for action in plan_down(part).actions:
                yield "", partial(remove, dry, action)


def _types(policy: Mapping[str, Any]) -> list[str]:
    wanted = [s.get("Condition", {}).get("StringEquals", {}) for s in policy["Statement"]]
    return [name for each in wanted for name in each.get("ec2:InstanceType", [])]


def _render_purchase(
    place: Network, image: images.Image, group: str, name: str, market: str
) -> dict[str, Any]:
    """Render a purchase without a key pair, and without a security group if there is none."""
    spec = build_spec(name=_NAME, stack="", ssh_cidrs=(_NOWHERE,), instance_types=(name,))
    purchase = Purchase(spec, "head", 1, image, group, lambda _offer: b"", {}, frozenset())
    # The request uses only the type's name.
    machine = InstanceType(name, 0, 0, None, 0, None, None)
    request = render_request(purchase, Offer(machine, place, market, False))
    return only_existing(request, inventory.Inventory())


def is_about_default_group(error: ClientError, request: Mapping[str, Any]) -> bool:
    """Return whether EC2 denied a purchase only because it names no group of this tool."""
    message = str(error.response["Error"].get("Message", ""))
    named = "Groups" in request["NetworkInterfaces"][0]
    return error_code(error) in DENIED and not named and _DEFAULT_GROUP in message


def only_existing(request: dict[str, Any], found: inventory.Inventory) -> dict[str, Any]:
    """Drop references to resources that do not exist yet, which a dry run would reject."""
    kept = dict(request)
    if not found.key_pairs:
        kept.pop("KeyName")
    if not found.placement_groups:
        kept.pop("Placement", None)
    interface = dict(request["NetworkInterfaces"][0])
    if interface["Groups"] == [""]:
        del interface["Groups"]
    return {**kept, "NetworkInterfaces": [interface]}


def _uses(clients: Clients, found: inventory.Inventory) -> Trials:
    """Try the calls that change a cluster's resources; the caller tries removals."""
    dry = clients.dry
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    rules: Any = [{**ssh, "IpRanges": [{"CidrIp": _NOWHERE}]}]
    for group in found.security_groups[:1]:
        for change in (
            dry.authorize_security_group_ingress,
            dry.authorize_security_group_egress,
            dry.revoke_security_group_ingress,
        ):
            yield "", partial(change, GroupId=group.id, IpPermissions=rules)
        yield "", partial(label_instances, dry, [group.id], {tags.CLUSTER: _NAME})
    for machine in found.alive[:1]:
        yield "", partial(dry.get_console_output, InstanceId=machine.id)
        yield "", partial(images.create_image, dry, machine.id, _NAME, _NAME, {})
