"""Instances and their containers. API calls change both, and each follows the other's changes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from moto.ec2.exceptions import EC2ClientError, InvalidParameterCombination
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance

from infra.errors import CloudError
from infra.local.api import refusals
from infra.local.api.lifecycle import set_reason
from infra.local.api.requests import reason_of
from infra.local.api.runtime import Part

# EC2 shows a terminated instance for about an hour:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
_TERMINATED_VISIBLE_S = 3600.0
# Exit codes of a container's first process after a reboot and a power-off: see SYS_BOOT in podman.py.
_EXIT_REBOOT, _EXIT_POWER_OFF = 129, 130
# After podman could not list or remove containers.
_RETRY_S = 30.0


@contextmanager
def podman_errors() -> Iterator[None]:
    """Report failures of podman, and a full disk, as EC2's InternalError."""
    try:
        yield
    except (CloudError, OSError) as error:
        raise EC2ClientError("InternalError", reason_of(error)) from None


class InstanceContainers(Part):
    """Keeps a region's instances and containers in sync."""

    _next_look = 0.0

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
            self._ec2.lifecycle.boot(instance)
        return started

    def stop(self, instance_ids: list[str]) -> Any:
        instances = self._ec2.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            refusals.require_state(instance, ("stopped", "running"), "stopped")
        with podman_errors():
            self._runtime.containers.stop(i.id for i in instances if i.state == "running")
        stopped = EC2Backend.stop_instances(self._ec2, instance_ids)
        self._ec2.lifecycle.refresh_pids()
        return stopped

    def terminate(self, instance_ids: list[str]) -> Any:
        if not instance_ids:
            raise InvalidParameterCombination("No instances specified")
        instances = self._ec2.get_multi_instances_by_id(instance_ids)
        before = [(instance, copy.copy(instance.instance_state)) for instance in instances]
        with podman_errors():
            # First: if a removal fails, the instance still runs, and the next `down` sees it.
            self._runtime.containers.remove(instance_ids)
        for instance in instances:
            if instance.state not in ("shutting-down", "terminated"):
                self._ec2.lifecycle.end(instance)
        self._ec2.images.remove_unused()
        return before

    def console_of(self, instance: Instance) -> str:
        """Return cloud-init's console output: the host keys; empty until the first boot created them.

        https://cloudinit.readthedocs.io/en/latest/reference/modules.html#keys-to-console
        """
        pid = self._ec2.lifecycle.pids.get(instance.id)
        keys = self._runtime.containers.host_keys(instance.id, pid) if pid else ()
        if not keys:
            return ""
        block = ("-----BEGIN SSH HOST KEY KEYS-----", *keys, "-----END SSH HOST KEY KEYS-----")
        return "\n".join(block) + "\n"

    # What happens without a call

    def resume(self, *, suspended: Collection[str]) -> None:
        """Bring the containers back to the saved state.

        Restarts nodes that were stopped from outside (``suspended``, or a crash of this machine).
        Stops or terminates the instances of nodes that have shut themselves down.
        """
        containers = self._runtime.containers
        found = containers.find(self._ec2.place)
        # A crash during a launch leaves containers behind that no response has mentioned.
        kept = [i for i in self._ec2.live_instances() if self._ec2.lifecycle.has_container(i)]
        containers.remove(found.keys() - {instance.id for instance in kept})
        for instance in kept:
            container = found.get(instance.id)
            if container is None:
                self._lose(instance)
            elif instance.state in ("pending", "running") and not container.running:
                if container.exit_code == _EXIT_POWER_OFF and container.name not in suspended:
                    self._shut_down(instance)
                else:
                    self._start_again(instance)

    def follow_containers(self) -> bool:
        """Apply to EC2 the shutdowns and reboots that nodes initiated; return whether there may be any."""
        containers = self._runtime.containers
        if self._runtime.now() < self._next_look:
            return False
        if all(map(containers.podman.is_alive, self._ec2.lifecycle.pids.values())):
            return False
        # If podman fails, each look would write to the log.
        self._next_look = self._runtime.now() + _RETRY_S
        found = containers.find(self._ec2.place)
        self._next_look = 0.0
        for instance in self._ec2.live_instances():
            container = found.get(instance.id)
            if instance.state != "running":
                continue
            if container is None:
                self._lose(instance)
            elif not container.running and container.exit_code == _EXIT_REBOOT:
                self._start_again(instance)
            elif not container.running:
                self._shut_down(instance)
        self._ec2.lifecycle.refresh_pids()
        return True

    def forget_ended(self) -> bool:
        """Forget instances that EC2 no longer shows; return whether there were any."""
        ec2, limit = self._ec2, self._runtime.now() - _TERMINATED_VISIBLE_S
        old = {id_ for id_, at in self._ec2.lifecycle.terminated_at.items() if at < limit}
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
            try:
                self.terminate([instance.id])
            except EC2ClientError as error:
                logging.warning("%s: %s", instance.id, error.message)
                self._next_look = self._runtime.now() + _RETRY_S
                return
        else:
            instance.stop()
        set_reason(instance, "Client.InstanceInitiatedShutdown", "Instance initiated shutdown")

    def _lose(self, instance: Instance) -> None:
        """Terminate an instance whose container was removed from outside, along with its disk."""
        self._runtime.containers.remove_seed(instance.id)
        self._ec2.lifecycle.end(instance)
        self._ec2.images.remove_unused()
        set_reason(instance, "Server.InternalError", "the instance's container was removed")

    def _start_again(self, instance: Instance) -> None:
        try:
            self._runtime.containers.start([instance.id])
        except CloudError as error:
            instance.stop()
            set_reason(instance, "Server.InternalError", error.message)
