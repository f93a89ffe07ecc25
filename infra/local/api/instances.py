"""Instances and their containers. API calls change both, and each follows the other's changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.ec2.exceptions import EC2ClientError, InvalidParameterCombination, OperationNotPermitted4
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance

from infra.errors import CloudError
from infra.local.api import refusals
from infra.local.api.images import LocalImages
from infra.local.api.lifecycle import InstanceLifecycle, set_reason
from infra.local.api.runtime import Runtime

# EC2 shows a terminated instance for about an hour:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
_TERMINATED_VISIBLE_S = 3600.0
# Exit codes of a container's first process after a reboot and a power-off: see SYS_BOOT in podman.py.
_EXIT_REBOOT, _EXIT_POWER_OFF = 129, 130


@contextmanager
def podman_errors() -> Iterator[None]:
    """Report podman failures as EC2's InternalError."""
    try:
        yield
    except CloudError as error:
        raise EC2ClientError("InternalError", error.message) from None


class InstanceContainers:
    """Keeps a region's instances and containers in sync."""

    def __init__(self, ec2: Any, images: LocalImages, lifecycle: InstanceLifecycle) -> None:
        self._ec2 = ec2
        self._runtime: Runtime = ec2.runtime
        self._images = images
        self._lifecycle = lifecycle

    # EC2's calls

    def start(self, instance_ids: list[str]) -> Any:
        instances = self._ec2.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            refusals.require_state(instance, ("stopped", "running"), "started")
        stopped = [i for i in instances if i.state == "stopped"]
        with podman_errors():
            self._runtime.containers.start(i.id for i in stopped)
        started = EC2Backend.start_instances(self._ec2, instance_ids)
        for instance in stopped:
            self._lifecycle.boot(instance)
        return started

    def stop(self, instance_ids: list[str]) -> Any:
        instances = self._ec2.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            refusals.require_state(instance, ("stopped", "running"), "stopped")
        with podman_errors():
            self._runtime.containers.stop(i.id for i in instances if i.state == "running")
        stopped = EC2Backend.stop_instances(self._ec2, instance_ids)
        self._lifecycle.refresh_pids()
        return stopped

    def reboot(self, instance_ids: list[str]) -> Any:
        instances = self._ec2.get_multi_instances_by_id(instance_ids)
        running = [i.id for i in instances if i.is_running()]
        with podman_errors():
            self._runtime.containers.stop(running)
            self._runtime.containers.start(running)
        self._lifecycle.refresh_pids()
        return EC2Backend.reboot_instances(self._ec2, running)

    def terminate(self, instance_ids: list[str]) -> Any:
        if not instance_ids:
            raise InvalidParameterCombination("No instances specified")
        instances = self._ec2.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            if str(instance.disable_api_termination).lower() == "true":
                raise OperationNotPermitted4(instance.id)
        before = [(instance, copy.copy(instance.instance_state)) for instance in instances]
        for instance in instances:
            if instance.state not in ("shutting-down", "terminated"):
                self._lifecycle.end(instance)
        with podman_errors():
            # Include terminated instances, because an earlier removal may have failed.
            self._runtime.containers.remove(instance_ids)
        self._images.remove_unused()
        return before

    def console_of(self, instance: Instance) -> str:
        """Return cloud-init's console output: the host keys; empty until the first boot created them.

        https://cloudinit.readthedocs.io/en/latest/reference/modules.html#keys-to-console
        """
        pid = self._lifecycle.pids.get(instance.id)
        keys = self._runtime.containers.host_keys(instance.id, pid) if pid else ()
        if not keys:
            return ""
        block = ("-----BEGIN SSH HOST KEY KEYS-----", *keys, "-----END SSH HOST KEY KEYS-----")
        return "\n".join(block) + "\n"

    # What happens without a call

    def resume(self, *, suspended: bool) -> None:
        """Bring the containers back to the saved state.

        Restarts nodes that were stopped from outside (``suspended``, or a crash of this machine).
        Stops or terminates the instances of nodes that have shut themselves down.
        """
        containers = self._runtime.containers
        found = containers.find(self._ec2.place)
        # A crash during a launch leaves containers behind that no response has mentioned.
        kept = [i for i in self._ec2.live_instances() if self._lifecycle.has_container(i)]
        containers.remove(found.keys() - {instance.id for instance in kept})
        for instance in kept:
            container = found.get(instance.id)
            if container is None:
                self._lose(instance)
            elif instance.state in ("pending", "running") and not container.running:
                if container.exit_code == _EXIT_POWER_OFF and not suspended:
                    self._shut_down(instance)
                else:
                    self._start_again(instance)

    def follow_containers(self) -> bool:
        """Apply to EC2 the shutdowns and reboots that nodes initiated; return whether there may be any."""
        containers = self._runtime.containers
        if all(map(containers.podman.is_alive, self._lifecycle.pids.values())):
            return False
        found = containers.find(self._ec2.place)
        rebooting = {disk_copy.rebooting for disk_copy in self._images.copies.values()}
        for instance in self._ec2.live_instances():
            container = found.get(instance.id)
            if instance.state != "running" or instance.id in rebooting:
                continue
            if container is None:
                self._lose(instance)
            elif not container.running and container.exit_code == _EXIT_REBOOT:
                self._start_again(instance)
            elif not container.running:
                self._shut_down(instance)
        self._lifecycle.refresh_pids()
        return True

    def forget_ended(self) -> bool:
        """Forget instances that EC2 no longer shows; return whether there were any."""
        ec2, limit = self._ec2, self._runtime.now() - _TERMINATED_VISIBLE_S
        old = {id_ for id_, at in self._lifecycle.terminated_at.items() if at < limit}
        if not old:
            return False
        for reservation_id, reservation in list(ec2.reservations.items()):
            reservation.instances = [i for i in reservation.instances if i.id not in old]
            if not reservation.instances:
                del ec2.reservations[reservation_id]
        for instance_id in old:
            ec2.forget_instance(instance_id)
        return True

    def _shut_down(self, instance: Instance) -> None:
        """Stop or terminate an instance that shut itself down, as specified at launch."""
        if instance.instance_initiated_shutdown_behavior == "terminate":
            self.terminate([instance.id])
        else:
            instance.stop()
        set_reason(instance, "Client.InstanceInitiatedShutdown", "Instance initiated shutdown")

    def _lose(self, instance: Instance) -> None:
        """Terminate an instance whose container was removed from outside, along with its disk."""
        self.terminate([instance.id])
        set_reason(instance, "Server.InternalError", "the instance's container was removed")

    def _start_again(self, instance: Instance) -> None:
        try:
            self._runtime.containers.start([instance.id])
        except CloudError as error:
            instance.stop()
            set_reason(instance, "Server.InternalError", error.message)
