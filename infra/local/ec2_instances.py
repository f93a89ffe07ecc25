"""Instances of the embedded cloud: what EC2's verbs do to the containers."""

from __future__ import annotations

import copy
from typing import Any

from moto.ec2.exceptions import InvalidParameterCombination, OperationNotPermitted4

from infra.local import refusals
from infra.local.ec2_launches import LaunchBackend
from infra.local.ec2_lifecycle import podman_errors


class InstancesBackend(LaunchBackend):
    """EC2 with a container behind every instance; every change here is a change there."""

    def start_instances(self, instance_ids: list[str]) -> Any:
        instances = self.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            refusals.require_state(instance, ("stopped", "running"), "started")
        stopped = [i for i in instances if i.state == "stopped"]
        for instance in stopped:
            self.require_room(instance)
        with podman_errors():
            self.containers.start(i.id for i in stopped)
        started = super().start_instances(instance_ids)
        for instance in stopped:
            self.boot(instance)
        return started

    def stop_instances(self, instance_ids: list[str]) -> Any:
        instances = self.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            refusals.require_state(instance, ("stopped", "running"), "stopped")
        with podman_errors():
            self.containers.stop(i.id for i in instances if i.state == "running")
        stopped = super().stop_instances(instance_ids)
        self._refresh_pids()
        return stopped

    def reboot_instances(self, instance_ids: list[str]) -> Any:
        running = [i.id for i in self.get_multi_instances_by_id(instance_ids) if i.is_running()]
        with podman_errors():
            self.containers.stop(running)
            self.containers.start(running)
        self._refresh_pids()
        return super().reboot_instances(running)

    def terminate_instances(self, instance_ids: list[str]) -> Any:
        if not instance_ids:
            raise InvalidParameterCombination("No instances specified")
        instances = self.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            if str(instance.disable_api_termination).lower() == "true":
                raise OperationNotPermitted4(instance.id)
        before = [(instance, copy.copy(instance.instance_state)) for instance in instances]
        for instance in instances:
            if instance.state not in ("shutting-down", "terminated"):
                self.end(instance)
        with podman_errors():
            # Also those that were terminated before: an earlier removal may have failed.
            self.containers.remove(instance_ids)
        self._remove_unused_images()
        return before
