"""EventBridge Scheduler that rejects roles that it can't assume, and acts only as its role may."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.iam.models import Role, iam_backends
from moto.scheduler.models import Schedule, ScheduleGroup

from infra.local.api.runtime import Runtime
from infra.local.api.schedules import LocalScheduler, machines_of
from tests.cloud.faults import faults_of

# https://docs.aws.amazon.com/scheduler/latest/UserGuide/setting-up.html#setting-up-execution-role
_SERVICE = "scheduler.amazonaws.com"
_NO_ROLE = "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."
_TERMINATE = "ec2:TerminateInstances"


class _DeletedGroup(ScheduleGroup):
    """A group that remains visible until its schedules are deleted.

    https://docs.aws.amazon.com/scheduler/latest/APIReference/API_DeleteScheduleGroup.html
    """

    def __init__(self, scheduler: FaultyScheduler, name: str, gone_at: float) -> None:
        super().__init__(scheduler.region_name, scheduler.account_id, name)
        self.gone_at = gone_at

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "State": "DELETING"}


class FaultyScheduler(LocalScheduler):
    """One region's schedules, under the active faults."""

    def __init__(self, region_name: str, account_id: str, *, runtime: Runtime) -> None:
        super().__init__(region_name, account_id)
        self.runtime = runtime

    @property
    def _roles(self) -> Mapping[str, Role]:
        """The account's roles by ARN."""
        iam = iam_backends[self.account_id]["aws"]
        return {role.arn: role for role in iam.roles.values()}

    # moto's methods

    def delete_schedule_group(self, name: str | None) -> None:
        group = self.get_schedule_group(name)
        if isinstance(group, _DeletedGroup):
            raise JsonRESTError("ConflictException", f"Schedule group {name} is being deleted.")
        super().delete_schedule_group(name)
        if wait_s := faults_of(self.runtime).now.times.terminate_s:
            gone_at = self.runtime.now() + wait_s
            self.schedule_groups[group.name] = _DeletedGroup(self, group.name, gone_at)

    def create_schedule(self, **values: Any) -> Schedule:
        self._require_role(values)
        return super().create_schedule(**values)

    def update_schedule(self, **values: Any) -> Schedule:
        self._require_role(values)
        return super().update_schedule(**values)

    def _require_role(self, values: Mapping[str, Any]) -> None:
        """Reject a role that the scheduler can't assume, or can't assume yet."""
        group = self.get_schedule_group(values["group_name"])
        role = self._roles.get(values["target"]["RoleArn"])
        source = {"aws:SourceAccount": self.account_id, "aws:SourceArn": group.arn}
        if role is None or not _allows(
            role.assume_role_policy_document, "sts:AssumeRole", source, service=_SERVICE
        ):
            raise JsonRESTError("ValidationException", _NO_ROLE)
        faults, now = faults_of(self.runtime).now, self.runtime.now()
        # moto's creation time of a role comes from this machine's clock, which tests replace.
        known_since = vars(role).setdefault("spr_first_used", now)
        if now < known_since + faults.role_visibility_s:
            raise JsonRESTError("ValidationException", _NO_ROLE)

    # What happens without a call

    def pass_time(self, ec2: Any) -> bool:
        for name, group in list(self.schedule_groups.items()):
            if isinstance(group, _DeletedGroup) and group.gone_at <= self.runtime.now():
                del self.schedule_groups[name]
        return super().pass_time(ec2)

    def invoke(self, schedule: Schedule, ec2: Any) -> None:
        role = self._roles[schedule.target["RoleArn"]]
        for id_ in machines_of(schedule):
            labels = {f"aws:ResourceTag/{k}": v for k, v in ec2.tags.get(id_, {}).items()}
            if not any(_allows(text, _TERMINATE, labels) for text in role.policies.values()):
                raise PermissionError(f"{role.arn} may not terminate {id_}")
        super().invoke(schedule, ec2)


def _allows(
    policy: str, action: str, values: Mapping[str, str], *, service: str | None = None
) -> bool:
    """Return whether a statement allows an action. The only supported condition is StringEquals."""
    return any(
        statement["Effect"] == "Allow"
        and action in (statement["Action"], *statement["Action"])
        and statement.get("Principal", {}).get("Service") == service
        and statement.get("Condition", {}).get("StringEquals", {}).items() <= values.items()
        for statement in json.loads(policy)["Statement"]
    )
