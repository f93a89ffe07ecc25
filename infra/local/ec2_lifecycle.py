"""What machines of the embedded cloud do in the course of time: boot, die, stop, end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import Instance, InstanceState, StateReason

from infra.errors import CloudError
from infra.local.containers import NodeContainer
from infra.local.ec2_spot_requests import SpotBackend
from infra.local.faults import Fate, MachineRule

# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceState.html
_CODES = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}
# Fates of machines that have no container behind them.
_NO_CONTAINER = ("never-boots", "dies")

Event = Literal["boots", "ends"] | Fate


@dataclass(frozen=True)
class PendingEvent:
    """Something that happens to a machine by itself, at a moment in seconds since 1970."""

    at: float
    instance_id: str
    event: Event


def set_state(instance: Instance, name: str) -> None:
    instance._state = InstanceState(name, _CODES[name])


def set_reason(instance: Instance, code: str, message: str) -> None:
    """Why a machine is in the state in which it is, as EC2 words it."""
    instance.state_reason = StateReason(f"{code}: {message}", code)


class LifeBackend(SpotBackend):
    """The part of a region's state that is about machines and time."""

    def __init__(self, region_name: str, account_id: str) -> None:
        self.known: dict[str, NodeContainer] = {}
        self.fates: dict[str, MachineRule] = {}
        """What the faults have in store for a machine; tests read it, too."""
        self.impaired: set[str] = set()
        self.due: list[PendingEvent] = []
        self.terminated_at: dict[str, float] = {}
        self._pids: dict[str, int] = {}
        super().__init__(region_name, account_id)

    def fate_of(self, instance_id: str) -> str:
        """The machine's fate, such as ``no-amx``; empty for an ordinary one."""
        return self.fates[instance_id].fate if instance_id in self.fates else ""

    def has_container(self, instance: Instance) -> bool:
        return (
            instance.state not in ("shutting-down", "terminated")
            and self.fate_of(instance.id) not in _NO_CONTAINER
        )

    def draw_fate(self, instance: Instance) -> None:
        if rule := self.faults.next_fate():
            self.fates[instance.id] = rule

    def live(self, instance: Instance) -> None:
        """A machine begins its life, towards its fate."""
        rule = self.fates.get(instance.id)
        if rule is None or rule.fate in ("no-ssh", "no-amx"):
            self.boot(instance)
            return
        set_state(instance, "pending")
        at = self.clock.time() + self.faults.now.times.boot_s
        if rule.fate == "dies":
            self.due.append(PendingEvent(at, instance.id, "dies"))
        elif rule.fate != "never-boots":
            self.boot(instance)
            self.due.append(PendingEvent(at + rule.after_s, instance.id, rule.fate))

    def boot(self, instance: Instance) -> None:
        """A machine is pending until it has booted."""
        set_state(instance, "pending")
        at = self.clock.time() + self.faults.now.times.boot_s
        self.due.append(PendingEvent(at, instance.id, "boots"))

    def end(self, instance: Instance, *, at_once: bool = False) -> None:
        """A machine begins to end; until it has ended, it holds its interfaces, volumes and groups."""
        self.due = [due for due in self.due if due.instance_id != instance.id]
        self.known.pop(instance.id, None)
        self._pids.pop(instance.id, None)
        set_state(instance, "shutting-down")
        set_reason(instance, "Client.UserInitiatedShutdown", "User initiated shutdown")
        self.close_spot_request(instance.id)
        wait_s = self.faults.now.times.terminate_s
        if wait_s and not at_once:
            self.due.append(PendingEvent(self.clock.time() + wait_s, instance.id, "ends"))
        else:
            self._finish(instance)

    def _finish(self, instance: Instance) -> None:
        reason = instance.state_reason
        instance.terminate()
        instance.state_reason = reason
        self.impaired.discard(instance.id)
        self.terminated_at[instance.id] = self.clock.time()

    def pass_time(self) -> bool:
        """Let happen what is due by now; returns whether there was anything."""
        now = self.clock.time()
        ready = sorted((due for due in self.due if due.at <= now), key=lambda due: due.at)
        if not ready:
            return False
        self.due = [due for due in self.due if due.at > now]
        for due in ready:
            self._happen(self.get_instance(due.instance_id), due.event)
        if any(due.event == "boots" for due in ready):
            self._refresh_pids()
        if any(due.event in ("dies", "ends") for due in ready):
            self._remove_unused_images()
        return True

    def _happen(self, instance: Instance, event: Event) -> None:
        if event == "boots":
            set_state(instance, "running")
        elif event == "ends":
            self._finish(instance)
        elif event == "dies":
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-launch.html
            self.end(instance, at_once=True)
            set_reason(instance, "Server.InternalError", "Internal error on launch")
        elif event == "stops" and instance.state == "running":
            self.containers.stop([instance.id])
            self._pids.pop(instance.id, None)
            instance.stop()
            set_reason(instance, "Server.ScheduledStop", "Stopped due to a scheduled retirement")
        elif event == "impaired":
            self.impaired.add(instance.id)
        elif event == "spot-notice" and (request := self.spot_request_of(instance.id)):
            request.set_code("marked-for-termination")

    def status_of(self, instance: Instance) -> str:
        """The instance status check: initializing, ok, impaired or not-applicable."""
        if instance.state == "running":
            return "impaired" if instance.id in self.impaired else "ok"
        return "initializing" if instance.state == "pending" else "not-applicable"

    def _refresh_pids(self) -> None:
        running = {i.id for i in self._alive() if i.state == "running"}
        self._pids = {
            instance_id: container.pid
            for instance_id, container in self.containers.containers(self.region_name).items()
            if instance_id in running
        }


@contextmanager
def podman_errors() -> Iterator[None]:
    """A failure of podman as EC2 would answer it."""
    try:
        yield
    except CloudError as error:
        raise EC2ClientError("InternalError", error.message) from None
