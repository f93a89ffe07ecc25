"""Tag policies of the account's organization, which can refuse the tags of what `up` makes.

https://docs.aws.amazon.com/organizations/latest/userguide/orgs_manage_policies_tag-policies.html
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from infra.clients import Clients, error_code

_NO_POLICY = {"AWSOrganizationsNotInUseException", "EffectivePolicyNotFoundException"}


def describe_tag_rules(clients: Clients) -> dict[str, Any]:
    """Return the rules that apply to this account, by the tag's key in lower case."""
    try:
        answer = clients.organizations.describe_effective_policy(PolicyType="TAG_POLICY")
    except ClientError as error:
        if error_code(error) not in _NO_POLICY:
            raise
        return {}
    rules: dict[str, Any] = json.loads(answer["EffectivePolicy"]["PolicyContent"]).get("tags", {})
    return rules


def find_tag_conflicts(
    rules: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]
) -> list[str]:
    """Return what rules refuse of these tags on a resource of EC2."""
    found = []
    for key, value in labels.items():
        rule = rules.get(key.lower(), {})
        if not any(each.startswith("ec2:") for each in rule.get("enforced_for", [])):
            continue
        values = rule.get("tag_value", ["*"])
        if rule.get("tag_key", key) != key:
            found.append(f"the tag {key} has to be {rule['tag_key']}")
        elif not any(fnmatch.fnmatchcase(value, each) for each in values):
            found.append(f"the tag {key} is {value}, and has to be {' or '.join(values)}")
    return found
