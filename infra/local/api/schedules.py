"""EventBridge Scheduler's groups and schedules, as strict as AWS where moto is not."""

from __future__ import annotations

from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.scheduler import urls
from moto.scheduler.models import EventBridgeSchedulerBackend, Schedule, ScheduleGroup


class LocalScheduler(EventBridgeSchedulerBackend):
    """One region's schedules, saved with EC2's state. No schedule is ever executed."""

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
