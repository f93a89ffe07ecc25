"""EventBridge Scheduler's groups and schedules, as strict as AWS where moto is not."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.scheduler import urls
from moto.scheduler.models import EventBridgeSchedulerBackend, Schedule, ScheduleGroup


class LocalScheduler(EventBridgeSchedulerBackend):
    """One region's schedules, saved with EC2's state. Their roles are not checked."""

    # moto looks for the API's URLs next to the backend's module.
    _url_module = urls

    # moto's methods

    def create_schedule_group(self, name: str, tags: Any) -> ScheduleGroup:
        if name in self.schedule_groups:
            raise JsonRESTError("ConflictException", f"Schedule group {name} already exists.")
        return super().create_schedule_group(name, tags)

    def delete_schedule_group(self, name: str | None) -> None:
        self.get_schedule_group(name)
        super().delete_schedule_group(name)

    def list_schedules(self, group_names: Any, *arguments: Any, **more: Any) -> Any:
        for name in group_names or ():
            self.get_schedule_group(name)
        return super().list_schedules(group_names, *arguments, **more)

    def create_schedule(self, **values: Any) -> Schedule:
        self.get_schedule_group(values["group_name"])
        return super().create_schedule(**values)

    # What happens without a call

    def pass_time(self, ec2: Any) -> bool:
        """Execute due schedules; return whether there were any."""
        now = datetime.fromtimestamp(ec2.runtime.now(), timezone.utc)
        due = [
            (group, schedule)
            for group in self.schedule_groups.values()
            for schedule in list(group.schedules.values())
            if _time_of(schedule) <= now
        ]
        for group, schedule in due:
            try:
                self.invoke(schedule, ec2)
            except Exception:
                # AWS's scheduler also reports failures only as a metric.
                logging.exception("schedule %s of %s failed", schedule.name, group.name)
            if schedule.action_after_completion == "DELETE":
                group.delete_schedule(schedule.name)
        return bool(due)

    def invoke(self, schedule: Schedule, ec2: Any) -> None:
        """Execute one schedule."""
        assert schedule.target["Arn"].endswith(":aws-sdk:ec2:terminateInstances")
        ec2.terminate_instances(machines_of(schedule))


def machines_of(schedule: Schedule) -> list[str]:
    """Return the IDs of the machines that a schedule terminates."""
    ids: list[str] = json.loads(schedule.target["Input"])["InstanceIds"]
    return ids


def _time_of(schedule: Schedule) -> datetime:
    text = schedule.schedule_expression.removeprefix("at(").removesuffix(")")
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
