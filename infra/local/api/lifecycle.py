"""Instances over time: boots and terminations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from moto.ec2.models.instances import Instance, InstanceState, StateReason

from infra.local.api.runtime import Part

# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceState.html
_CODES = {"pending": 0, "running": 16, "shutting-down": 32}


@dataclass(frozen=True)
class PendingEvent:
    """An event of an instance, such as ``boots``, due at a time in seconds since 1970."""

    at: float
    instance_id: str
    event: str


def set_state(instance: Instance, name: str) -> None:
    instance._state = InstanceState(name, _CODES[name])


def set_reason(instance: Instance, code: str, message: str) -> None:
    """Record why an instance is in its state, in EC2's format."""
    instance.state_reason = StateReason(f"{code}: {message}", code)


class InstanceLifecycle(Part):
    """A region's instances over time."""

    def __init__(self, ec2: Any) -> None:
        super().__init__(ec2)
        self.terminated_at: dict[str, float] = {}
        self.profiles: dict[str, str] = {}
        """The instance profile of each instance that has one."""
        self.cpus: dict[str, tuple[int, ...]] = {}
        """The CPUs of each instance that has a container."""
        self.pids: dict[str, int] = {}
        """The pid of each running container's first process, by instance id."""
        self._pending: list[PendingEvent] = []

    def has_container(self, instance: Instance) -> bool:
        return instance.state not in ("shutting-down", "terminated")

    def begin(self, instance: Instance) -> None:
        """Boot a new instance."""
        self.boot(instance)

    def boot(self, instance: Instance) -> None:
        """Make an instance pending, and schedule the end of its boot."""
        set_state(instance, "pending")
        self.schedule(instance, "boots", self._runtime.conditions.boot_s)

    def end(self, instance: Instance, *, at_once: bool = False) -> None:
        """Start terminating an instance; it keeps its interfaces, volumes, and groups until it has ended."""
        self._pending = [event for event in self._pending if event.instance_id != instance.id]
        self.cpus.pop(instance.id, None)
        self.pids.pop(instance.id, None)
        set_state(instance, "shutting-down")
        set_reason(instance, "Client.UserInitiatedShutdown", "User initiated shutdown")
        when = datetime.fromtimestamp(self._runtime.now(), timezone.utc)
        instance._reason = f"User initiated ({when:%Y-%m-%d %H:%M:%S} GMT)"
        self._ec2.spot_requests.close(instance.id)
        wait_s = self._runtime.conditions.terminate_s
        if wait_s and not at_once:
            self.schedule(instance, "ends", wait_s)
        else:
            self.finish(instance)

    def forget(self, instance_id: str) -> None:
        """Delete all data about an instance."""
        for known in (self.terminated_at, self.cpus, self.profiles):
            known.pop(instance_id, None)

    def pass_time(self) -> bool:
        """Process due events; return whether there were any."""
        now = self._runtime.now()
        due = sorted((e for e in self._pending if e.at <= now), key=lambda event: event.at)
        if not due:
            return False
        self._pending = [event for event in self._pending if event.at > now]
        for event in due:
            self.happen(self._ec2.get_instance(event.instance_id), event.event)
        if any(event.event == "boots" for event in due):
            self.refresh_pids()
        if any(event.event != "boots" for event in due):
            self._ec2.images.remove_unused()
        return True

    def status_of(self, instance: Instance) -> str:
        """Return the status checks' result: initializing, ok, or not-applicable."""
        checks = {"running": "ok", "pending": "initializing"}
        return checks.get(instance.state, "not-applicable")

    def refresh_pids(self) -> None:
        running = {i.id for i in self._ec2.live_instances() if i.state == "running"}
        found = self._runtime.containers.find(self._ec2.place)
        self.pids = {id_: container.pid for id_, container in found.items() if id_ in running}

    def schedule(self, instance: Instance, event: str, after_s: float) -> None:
        at = self._runtime.now() + after_s
        self._pending.append(PendingEvent(at, instance.id, event))

    def happen(self, instance: Instance, event: str) -> None:
        if event == "boots":
            set_state(instance, "running")
        elif event == "ends":
            self.finish(instance)

    def finish(self, instance: Instance) -> None:
        kept = instance.state_reason, instance._reason
        instance.terminate()
        instance.state_reason, instance._reason = kept
        self.terminated_at[instance.id] = self._runtime.now()
