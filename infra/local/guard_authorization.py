"""What AWS authorizes for the calls of the second guard: to IAM and to EventBridge Scheduler.

Resources, condition keys, and dependent actions:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_awsidentityandaccessmanagementiam.html
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazoneventbridgescheduler.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from infra.local.policy import Request, keys_of_tags
from infra.local.requests import ApiCall


def iam_requests(call: ApiCall, account: str, given: Mapping[str, str]) -> Iterator[Request]:
    """Yield what IAM authorizes for a call with these parameters."""
    role = f"arn:aws:iam::{account}:role/{given['RoleName']}" if "RoleName" in given else "*"
    tags = {
        value: given.get(f"{key.removesuffix('Key')}Value", "")
        for key, value in given.items()
        if re.fullmatch(r"Tags\.member\.\d+\.Key", key)
    }
    keys = {"aws:PrincipalAccount": account, **keys_of_tags(tags)}
    yield Request(f"iam:{call.action}", role, keys)
    if call.action == "CreateRole" and tags:
        yield Request("iam:TagRole", role, keys)


def scheduler_requests(call: ApiCall, account: str) -> Iterator[Request]:
    """Yield what EventBridge Scheduler authorizes for a call. Lists have no resource."""
    given = json.loads(call.body or b"{}")
    kind, _, name = call.path.strip("/").partition("/")
    here = f"arn:aws:scheduler:{call.region}:{account}"
    resource = {
        "schedule-groups": f"{here}:schedule-group/{name}",
        "schedules": f"{here}:schedule/{given.get('GroupName', 'default')}/{name}",
        "tags": name,
    }.get(kind, "*")
    always = {"aws:PrincipalAccount": account}
    tags = {tag["Key"]: tag["Value"] for tag in given.get("Tags", ())}
    keys = {**always, **keys_of_tags(tags)}
    yield Request(f"scheduler:{call.action}", resource if name else "*", keys)
    if call.action == "CreateScheduleGroup" and tags:
        yield Request("scheduler:TagResource", resource, keys)
    elif call.action == "DeleteScheduleGroup":
        yield Request("scheduler:DeleteSchedule", f"{here}:schedule/{name}/*", always)
    elif role := given.get("Target", {}).get("RoleArn"):
        passed = {**always, "iam:PassedToService": "scheduler.amazonaws.com"}
        yield Request("iam:PassRole", role, passed)
