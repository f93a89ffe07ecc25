"""Instances over time: boots, failures, stops, and terminations."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

from moto.ec2.models.instances import Instance, InstanceState, StateReason

from infra.local.api.images import LocalImages
from infra.local.api.runtime import Runtime
from infra.local.api.spot_requests import SpotRequests
from infra.local.faults import Fate, MachineRule

# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceState.html
_CODES = {"pending": 0, "running": 16, "shutting-down": 32}
_FATES_WITHOUT_CONTAINER = ("never-boots", "no-guest", "dies", "no-key")
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-launch.html
_WHY_IT_DIED = {
    "dies": ("Server.InternalError", "Internal error on launch"),
    "no-key": ("Client.InternalError", "Client error on launch"),
}

Event = Literal["boots", "ends", "reclaimed"] | Fate


@dataclass(frozen=True)
class PendingEvent:
    """An event of an instance, due at a time in seconds since 1970."""

    at: float
    instance_id: str
    event: Event


def set_state(instance: Instance, name: str) -> None:
    instance._state = InstanceState(name, _CODES[name])


def set_reason(instance: Instance, code: str, message: str) -> None:
    """Record why an instance is in its state, in EC2's format."""
    instance.state_reason = StateReason(f"{code}: {message}", code)


class InstanceLifecycle:
    """A region's instances over time, with the fates that the faults assign to them."""

    def __init__(self, ec2: Any, images: LocalImages, spot_requests: SpotRequests) -> None:
        self._ec2 = ec2
        self._runtime: Runtime = ec2.runtime
        self._images = images
        self._spot_requests = spot_requests
        self.fates: dict[str, MachineRule] = {}
        self.impaired: set[str] = set()
        self.terminated_at: dict[str, float] = {}
        self.profiles: dict[str, str] = {}
        """The instance profile of each instance that has one."""
        self.cpus: dict[str, tuple[int, ...]] = {}
        """The CPUs of each instance that has a container."""
        self.pids: dict[str, int] = {}
        """The pid of each running container's first process, by instance id."""
        self._pending: list[PendingEvent] = []

    def fate_of(self, instance_id: str) -> str:
        """Return an instance's fate, such as ``no-amx``; "" for an ordinary instance."""
        return self.fates[instance_id].fate if instance_id in self.fates else ""

    def has_container(self, instance: Instance) -> bool:
        return (
            instance.state not in ("shutting-down", "terminated")
            and self.fate_of(instance.id) not in _FATES_WITHOUT_CONTAINER
        )

    def begin(self, instance: Instance) -> None:
        """Boot a new instance and schedule its fate, if it has one."""
        rule = self.fates.get(instance.id)
        if rule is None or rule.fate in ("no-guest", "no-ssh", "no-amx"):
            self.boot(instance)
            return
        set_state(instance, "pending")
        boot_s = self._runtime.faults.now.times.boot_s
        if rule.fate in _WHY_IT_DIED:
            self._schedule(instance, rule.fate, boot_s)
        elif rule.fate != "never-boots":
            self.boot(instance)
            if rule.fate == "slow-checks":
                self._schedule(instance, "impaired", boot_s)
            self._schedule(instance, rule.fate, boot_s + rule.after_s)

    def boot(self, instance: Instance) -> None:
        """Make an instance pending, and schedule the end of its boot."""
        set_state(instance, "pending")
        self._schedule(instance, "boots", self._runtime.faults.now.times.boot_s)

    def end(self, instance: Instance, *, at_once: bool = False) -> None:
        """Start terminating an instance; it keeps its interfaces, volumes, and groups until it has ended."""
        self._pending = [event for event in self._pending if event.instance_id != instance.id]
        self.cpus.pop(instance.id, None)
        self.pids.pop(instance.id, None)
        set_state(instance, "shutting-down")
        set_reason(instance, "Client.UserInitiatedShutdown", "User initiated shutdown")
        self._spot_requests.close(instance.id)
        wait_s = self._runtime.faults.now.times.terminate_s
        if wait_s and not at_once:
            self._schedule(instance, "ends", wait_s)
        else:
            self._finish(instance)

    def forget(self, instance_id: str) -> None:
        """Delete all data about an instance."""
        for known in (self.fates, self.terminated_at, self.cpus, self.profiles):
            known.pop(instance_id, None)

    def pass_time(self) -> bool:
        """Process due events; return whether there were any."""
        now = self._runtime.now()
        self._interrupt()
        due = sorted((e for e in self._pending if e.at <= now), key=lambda event: event.at)
        if not due:
            return False
        self._pending = [event for event in self._pending if event.at > now]
        for event in due:
            self._happen(self._ec2.get_instance(event.instance_id), event.event)
        if any(event.event == "boots" for event in due):
            self.refresh_pids()
        if any(event.event in ("ends", "reclaimed", *_WHY_IT_DIED) for event in due):
            self._images.remove_unused()
        return True

    def status_of(self, instance: Instance) -> str:
        """Return the status checks' result: initializing, ok, impaired, or not-applicable."""
        if instance.state == "running" and self.fate_of(instance.id) != "no-guest":
            return "impaired" if instance.id in self.impaired else "ok"
        return "initializing" if instance.state in ("pending", "running") else "not-applicable"

    def refresh_pids(self) -> None:
        running = {i.id for i in self._ec2.live_instances() if i.state == "running"}
        found = self._runtime.containers.find(self._ec2.place)
        self.pids = {id_: container.pid for id_, container in found.items() if id_ in running}

    def _schedule(self, instance: Instance, event: Event, after_s: float) -> None:
        at = self._runtime.now() + after_s
        self._pending.append(PendingEvent(at, instance.id, event))

    def _happen(self, instance: Instance, event: Event) -> None:
        if event == "boots":
            set_state(instance, "running")
        elif event == "ends":
            self._finish(instance)
        elif event in _WHY_IT_DIED:
            self.end(instance, at_once=True)
            set_reason(instance, *_WHY_IT_DIED[event])
        elif event == "stops" and instance.state == "running":
            self._runtime.containers.stop([instance.id])
            self.pids.pop(instance.id, None)
            instance.stop()
            set_reason(instance, "Server.ScheduledStop", "Stopped due to a scheduled retirement")
        elif event == "impaired":
            self.impaired.add(instance.id)
        elif event == "slow-checks":
            self.impaired.discard(instance.id)
        elif event == "spot-notice":
            self._give_notice(instance)
        elif event == "reclaimed":
            self.end(instance)
            set_reason(instance, "Server.SpotInstanceTermination", "Spot instance termination")
            self._spot_requests.close(instance.id, "instance-terminated-no-capacity")
            self._runtime.containers.remove([instance.id])

    def _interrupt(self) -> None:
        """Schedule notices for the spot instances that the faults interrupt."""
        for instance_id in self._runtime.faults.now.spot.interrupt:
            request = self._spot_requests.find(instance_id)
            if request and request.code == "fulfilled":
                self._schedule(self._ec2.get_instance(instance_id), "spot-notice", 0)

    def _give_notice(self, instance: Instance) -> None:
        """Announce a spot interruption to its instance and schedule the termination.

        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
        """
        request = self._spot_requests.find(instance.id)
        if request is None or request.code != "fulfilled":
            return
        request.set_code("marked-for-termination")
        wait_s = self._runtime.faults.now.spot.notice_s
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._runtime.now() + wait_s))
        notice = json.dumps({"action": "terminate", "time": at})
        self._runtime.containers.write_metadata(instance.id, "spot/instance-action", notice)
        self._schedule(instance, "reclaimed", wait_s)

    def _finish(self, instance: Instance) -> None:
        reason = instance.state_reason
        instance.terminate()
        instance.state_reason = reason
        self.impaired.discard(instance.id)
        self.terminated_at[instance.id] = self._runtime.now()
