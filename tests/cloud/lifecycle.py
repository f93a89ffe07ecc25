"""The fates of instances: failed boots, failed checks, stops, and spot interruptions."""

from __future__ import annotations

import json
import time
from typing import Any

from moto.ec2.models.instances import Instance

from infra.local.api.lifecycle import InstanceLifecycle, set_reason, set_state
from tests.cloud.faults import MachineRule, faults_of
from tests.cloud.meter import Meter

_WITHOUT_CONTAINER = ("never-boots", "no-guest", "dies", "no-room", "no-key", "no-storage")
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-launch.html
_WHY_IT_DIED = {
    "dies": ("Server.InternalError", "Internal error on launch"),
    "no-room": (
        "Server.InsufficientInstanceCapacity",
        "There was insufficient capacity available to satisfy the launch request",
    ),
    "no-key": ("Client.InternalError", "Client error on launch"),
    "no-storage": ("Client.VolumeLimitExceeded", "Volume limit exceeded"),
}


class FatefulLifecycle(InstanceLifecycle):
    """A region's instances over time, with the fates that the faults assign to them."""

    def __init__(self, ec2: Any) -> None:
        super().__init__(ec2)
        self.fates: dict[str, MachineRule] = {}
        self.impaired: set[str] = set()
        self.meter = Meter(self._runtime.conditions)

    def fate_of(self, instance_id: str) -> str:
        """Return an instance's fate, such as ``no-amx``; "" for an ordinary instance."""
        return self.fates[instance_id].fate if instance_id in self.fates else ""

    def has_container(self, instance: Instance) -> bool:
        return (
            super().has_container(instance) and self.fate_of(instance.id) not in _WITHOUT_CONTAINER
        )

    def begin(self, instance: Instance) -> None:
        """Boot a new instance and schedule its fate, if it has one."""
        disks = [self._ec2.volumes[disk.volume_id] for _, disk in instance.get_block_device_mapping]
        spot = self._ec2.spot_requests.find(instance.id) is not None
        gib, mib_s = (sum(getattr(d, name) for d in disks) for name in ("size", "throughput"))
        self.meter.create(instance, self._runtime.now(), gib, mib_s, spot=spot)
        rule = self.fates.get(instance.id)
        if rule is None or rule.fate in ("no-guest", "no-ssh", "no-amx"):
            self.boot(instance)
            return
        set_state(instance, "pending")
        boot_s = self._runtime.conditions.boot_s
        if rule.fate in _WHY_IT_DIED:
            self.schedule(instance, rule.fate, boot_s)
        elif rule.fate != "never-boots":
            self.boot(instance)
            if rule.fate == "slow-checks":
                self.schedule(instance, "impaired", boot_s)
            self.schedule(instance, rule.fate, boot_s + rule.after_s)

    def forget(self, instance_id: str) -> None:
        super().forget(instance_id)
        self.fates.pop(instance_id, None)

    def pass_time(self) -> bool:
        self._interrupt()
        return super().pass_time()

    def status_of(self, instance: Instance) -> str:
        found = super().status_of(instance)
        if found == "ok" and self.fate_of(instance.id) == "no-guest":
            return "initializing"
        return "impaired" if found == "ok" and instance.id in self.impaired else found

    def happen(self, instance: Instance, event: str) -> None:
        super().happen(instance, event)
        if event == "boots":
            self.meter.uses[instance.id].start(self._runtime.now())
        if event in _WHY_IT_DIED:
            self.end(instance, at_once=True)
            set_reason(instance, *_WHY_IT_DIED[event])
        elif event == "stops" and instance.state == "running":
            self._runtime.containers.stop([instance.id])
            self.pids.pop(instance.id, None)
            instance.stop()
            self.meter.uses[instance.id].stop(self._runtime.now())
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
            self._ec2.spot_requests.close(instance.id, "instance-terminated-no-capacity")
            self._runtime.containers.remove([instance.id])

    def _interrupt(self) -> None:
        """Schedule notices for the spot instances that the faults interrupt."""
        for instance_id in faults_of(self._runtime).now.spot.interrupt:
            request = self._ec2.spot_requests.find(instance_id)
            if request and request.code == "fulfilled":
                self.schedule(self._ec2.get_instance(instance_id), "spot-notice", 0)

    def _give_notice(self, instance: Instance) -> None:
        """Announce a spot interruption to its instance and schedule the termination.

        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
        """
        request = self._ec2.spot_requests.find(instance.id)
        if request is None or request.code != "fulfilled":
            return
        request.set_code("marked-for-termination")
        wait_s = faults_of(self._runtime).now.spot.notice_s
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._runtime.now() + wait_s))
        notice = json.dumps({"action": "terminate", "time": at})
        self._runtime.containers.write_metadata(instance.id, "spot/instance-action", notice)
        self.schedule(instance, "reclaimed", wait_s)

    def end(self, instance: Instance, *, at_once: bool = False) -> None:
        use = self.meter.uses[instance.id]
        use.ended = self._runtime.now()
        use.stop(use.ended)
        super().end(instance, at_once=at_once)

    def finish(self, instance: Instance) -> None:
        super().finish(instance)
        self.meter.uses[instance.id].deleted = self._runtime.now()
        self.impaired.discard(instance.id)
