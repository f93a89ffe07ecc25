"""The second guard: EventBridge Scheduler terminates machines that did not shut down at their deadline.

The first guard runs on the machine itself and fails if the machine never boots. A cluster has one
schedule group, and one role that may terminate only machines with the cluster's tag. Each machine has its
own schedule, named by its ID, because TerminateInstances rejects a list with an unknown ID, and EC2
forgets a terminated machine after an hour. Schedules can't have tags; their group has them, and deleting
it deletes its schedules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError

from infra.aws.clients import DENIED, Clients, error_code, is_passing, retry, unless
from infra.aws.roles import delete_role, make_role
from infra.ec2 import tags
from infra.ec2.inventory import Inventory, SecondGuard
from infra.lifetime import AFTER
from infra.wait import CONSISTENCY_DEADLINE_S, Clock, wait_until

# https://aws.amazon.com/eventbridge/pricing/ ; IAM and schedule groups are free.
COST = "free: one of 14 million free invocations a month for each node"
_TAKEN = {"ConflictException"}
# A group's deletion takes a while, and another deletion in the meantime is a conflict.
_MISSING = {"ResourceNotFoundException", "NoSuchEntity", *_TAKEN}
_PARALLEL = 8


class ClusterGuard:
    """The second guard of one cluster in the clients' region."""

    def __init__(
        self,
        clients: Clients,
        cluster: str,
        clock: Clock | None = None,
        boundary: str | None = None,
    ) -> None:
        self._boundary = boundary
        self._scheduler, self._iam, self._clock = clients.scheduler, clients.iam, clock
        self._cluster, self._group = cluster, tags.resource_name(cluster)
        self._tags: Any = tags.to_aws(tags.resource_tags(cluster, "guard"))
        self._role = tags.guard_role(cluster, self._scheduler.meta.region_name)

    def find(self) -> tuple[SecondGuard, ...]:
        """Return the guard with its scheduled machines; empty if neither group nor role exists."""
        pages = self._scheduler.get_paginator("list_schedules").paginate(GroupName=self._group)
        listed = unless(_MISSING, lambda: [item for page in pages for item in page["Schedules"]])
        if listed is None and not unless(_MISSING, lambda: self._iam.get_role(RoleName=self._role)):
            return ()
        return (SecondGuard(self._group, frozenset(item["Name"] for item in listed or ())),)

    def protect(self, ids: Iterable[str], expires: datetime, *, moves: bool = False) -> None:
        """Schedule the termination of these machines at :data:`AFTER` past their deadline.

        Creates the group and the role if they are missing, even without machines. With ``moves``,
        also updates existing schedules.
        """
        role = self._made_role
        requests = [self._schedule(id_, expires, role) for id_ in ids]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(lambda request: self._put(request, moves=moves), requests))

    def remove(self) -> None:
        """Delete the role, then the group with its schedules."""
        delete_role(self._iam, self._role)
        unless(_MISSING, lambda: self._scheduler.delete_schedule_group(Name=self._group))

    @cached_property
    def _made_role(self) -> str:
        """Create the group and the role if they are missing; return the role's ARN."""
        what, limit = f"schedule group {self._group}", CONSISTENCY_DEADLINE_S
        group = wait_until(what, self._make_group, deadline_s=limit, clock=self._clock)
        _, partition, _, region, account, _ = group.split(":")
        # The ARN here must be that of a schedule group:
        # https://docs.aws.amazon.com/scheduler/latest/UserGuide/cross-service-confused-deputy-prevention.html
        source = {"aws:SourceAccount": account, "aws:SourceArn": group}
        ours = {f"aws:ResourceTag/{tags.CLUSTER}": self._cluster}
        rights = {
            "Action": "ec2:TerminateInstances",
            "Condition": {"StringEquals": ours},
            "Resource": f"arn:{partition}:ec2:{region}:{account}:instance/*",
        }
        service = {"Service": "scheduler.amazonaws.com"}
        make_role(
            self._iam,
            {"Principal": service, "Condition": {"StringEquals": source}},
            [rights],
            self._boundary,
            self._clock,
            RoleName=self._role,
            Description=f"Terminates machines of cluster {self._cluster} after their deadline",
            Tags=self._tags,
        )
        return f"arn:{partition}:iam::{account}:role/{self._role}"

    def _make_group(self) -> str | None:
        """Return the group's ARN, or ``None`` while AWS is deleting an earlier group."""
        name, client = self._group, self._scheduler
        made = unless(_TAKEN, lambda: client.create_schedule_group(Name=name, Tags=self._tags))
        if made:
            return made["ScheduleGroupArn"]
        found = unless(_MISSING, lambda: client.get_schedule_group(Name=name))
        return found["Arn"] if found and found["State"] == "ACTIVE" else None

    def _schedule(self, instance_id: str, expires: datetime, role: str) -> dict[str, Any]:
        partition = role.split(":")[1]
        at = (expires + AFTER).astimezone(timezone.utc)
        return {
            "GroupName": self._group,
            "Name": instance_id,
            "ScheduleExpression": f"at({at:%Y-%m-%dT%H:%M:%S})",
            "ScheduleExpressionTimezone": "UTC",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "ActionAfterCompletion": "DELETE",
            # https://docs.aws.amazon.com/scheduler/latest/UserGuide/managing-targets-universal.html
            "Target": {
                "Arn": f"arn:{partition}:scheduler:::aws-sdk:ec2:terminateInstances",
                "RoleArn": role,
                "Input": json.dumps({"InstanceIds": [instance_id]}),
                "RetryPolicy": {"MaximumEventAgeInSeconds": 86400, "MaximumRetryAttempts": 185},
            },
        }

    def _put(self, request: dict[str, Any], *, moves: bool) -> None:
        def put() -> None:
            made = unless(_TAKEN, lambda: self._scheduler.create_schedule(**request))
            if moves and not made:
                self._scheduler.update_schedule(**request)

        retry(put, _is_too_early, deadline_s=CONSISTENCY_DEADLINE_S, clock=self._clock)


def is_guarded(found: Inventory) -> bool:
    """Return whether the cluster has a second guard, according to its record."""
    return any(group.tags.get(tags.GUARD) for group in found.security_groups)


def with_guard(clients: Clients, cluster: str, found: Inventory, *, is_certain: bool) -> Inventory:
    """Add the second guard to an inventory.

    Unless ``is_certain``, treats missing permission or a missing endpoint as "no guard".
    """
    try:
        return replace(found, guards=ClusterGuard(clients, cluster).find())
    except (ClientError, BotoCoreError) as error:
        if is_certain or not _is_closed(error):
            raise
        return found


def with_guards(clients: Clients, clusters: dict[str, Inventory]) -> dict[str, Inventory]:
    """Add a region's guards to its clusters, including clusters with no other resources."""
    scheduler, guarded = clients.scheduler, dict(clusters)
    prefix = tags.resource_name("")
    pages = scheduler.get_paginator("list_schedule_groups").paginate(NamePrefix=prefix)
    try:
        for group in [group for page in pages for group in page["ScheduleGroups"]]:
            list_tags = partial(scheduler.list_tags_for_resource, ResourceArn=group["Arn"])
            # Another command may have deleted the group since.
            listed = unless(_MISSING, list_tags)
            labels = tags.from_aws(listed["Tags"]) if listed else {}
            if cluster := labels.get(tags.CLUSTER):
                found = guarded.get(cluster, Inventory())
                guarded[cluster] = replace(found, guards=(SecondGuard(group["Name"]),))
    except (ClientError, BotoCoreError) as error:
        if not _is_closed(error):
            raise
    return guarded


def _is_closed(error: Exception) -> bool:
    """Return whether the caller can't use the scheduler: no permission, or no endpoint here."""
    if isinstance(error, ClientError):
        return error_code(error) in DENIED
    return isinstance(error, EndpointConnectionError)


def _is_too_early(error: Exception) -> bool:
    """Return whether a retry may succeed: the scheduler sees a new role after some seconds.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html#troubleshoot_general_eventual-consistency
    """
    return is_passing(error) or "to assume the role" in str(error)
