"""Instances of the embedded cloud: what EC2's verbs do to the containers."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import Instance

from infra.errors import CloudError
from infra.local import teeth
from infra.local.ec2_images import ImagesBackend
from infra.local.engine import mac_of
from infra.local.host import choose_cpus
from infra.local.nodes import Node, NodeRequest
from infra.local.seed import Seed, hostname_of

# What moto puts in place of a client token that was not sent.
_NO_CLIENT_TOKEN = "ABCDE"


class InstancesBackend(ImagesBackend):
    """EC2 with a container behind every instance; every change here is a change there."""

    def __init__(self, region_name: str, account_id: str) -> None:
        self.known: dict[str, Node] = {}
        self.terminated_at: dict[str, float] = {}
        self._pids: dict[str, int] = {}
        super().__init__(region_name, account_id)

    def run_instances(
        self,
        image_id: str,
        count: int,
        user_data: Any,
        security_group_names: list[str],
        **kwargs: Any,
    ) -> Any:
        if same := self._find_launch(kwargs.get("client_token")):
            return same
        image = teeth.require_image(self, image_id)
        teeth.require_instance_type(self, kwargs["instance_type"])
        public_key = teeth.require_key_pair(self, kwargs.get("key_name"))
        self._fill_in_subnet(kwargs)
        self._fill_in_root_device(kwargs, image.root_device_name)
        before = set(self.reservations)
        try:
            reservation = super().run_instances(
                image_id, count, user_data, security_group_names, **kwargs
            )
            for instance in reservation.instances:
                teeth.require_in_default_vpc(self, instance)
                self._complete(instance, kwargs)
            self._launch(reservation.instances, public_key, user_data)
        except Exception:
            for reservation_id in set(self.reservations) - before:
                self._forget(reservation_id)
            raise
        return reservation

    def _find_launch(self, client_token: str | None) -> Any:
        """What this token has launched already: clients send a request again when in doubt."""
        for reservation in self.reservations.values():
            if client_token in {i.client_token for i in reservation.instances}:
                return reservation if client_token != _NO_CLIENT_TOKEN else None
        return None

    def _fill_in_subnet(self, kwargs: dict[str, Any]) -> None:
        """EC2 takes a default subnet where none is named; moto would invent an address."""
        first = next((n for n in kwargs["nics"] if int(n.get("DeviceIndex", 0)) == 0), None)
        target, key = (kwargs, "subnet_id") if first is None else (first, "SubnetId")
        if target.get(key) or (first and first.get("NetworkInterfaceId")):
            return
        subnets = self.get_default_subnets()
        zone = kwargs.get("placement") or min(subnets)
        if zone not in subnets:
            raise EC2ClientError(
                "MissingInput", f"No default subnet for availability zone: '{zone}'."
            )
        target[key] = subnets[zone].id

    def _fill_in_root_device(self, kwargs: dict[str, Any], root_device: str) -> None:
        """The root volume goes with its instance unless the request says otherwise."""
        for mapping in kwargs.get("block_device_mappings", []):
            if mapping["DeviceName"] == root_device:
                mapping["Ebs"].setdefault("DeleteOnTermination", True)

    def _complete(self, instance: Instance, kwargs: dict[str, Any]) -> None:
        """Give a new instance what moto leaves out."""
        asked = {int(nic.get("DeviceIndex", 0)): nic for nic in kwargs["nics"]}
        for index, interface in instance.nics.items():
            interface.mac_address = mac_of(interface.private_ip_address)
            nic = asked.get(index, {})
            if "NetworkInterfaceId" not in nic:
                keep = str(nic.get("DeleteOnTermination", True)).lower() == "false"
                interface.delete_on_termination = not keep
                interface.add_tags(kwargs.get("tags", {}).get("network-interface", {}))
        if not instance.security_groups:
            instance.security_groups = list(instance.nics[0].group_set)

    def _launch(self, instances: Sequence[Instance], public_key: str, user_data: Any) -> None:
        in_use = [node.cpus for node in self.known.values()]
        content = base64.b64decode(str(user_data)) if user_data else b""
        requests = []
        for instance, cpus in zip(instances, choose_cpus(len(instances), in_use), strict=True):
            address = instance.private_ip
            seed = Seed(instance.id, hostname_of(address), public_key, content)
            node = Node(instance.id, address, cpus)
            requests.append(
                NodeRequest(node, self.region_name, self.disk_of(instance.image_id), seed)
            )
        with _engine_errors():
            self.nodes.launch(requests)
        self.known.update({request.node.instance_id: request.node for request in requests})
        self._refresh_pids()

    def _forget(self, reservation_id: str) -> None:
        """Undo a launch that failed, as if it had never been asked for."""
        for instance in self.reservations[reservation_id].instances:
            if instance.state != "terminated":
                instance.terminate()
            self.known.pop(instance.id, None)
        del self.reservations[reservation_id]

    def start_instances(self, instance_ids: list[str]) -> Any:
        instances = self.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            teeth.require_disk(instance, "started")
        with _engine_errors():
            self.nodes.start(i.id for i in instances if i.state == "stopped")
        started = super().start_instances(instance_ids)
        self._refresh_pids()
        return started

    def stop_instances(self, instance_ids: list[str]) -> Any:
        instances = self.get_multi_instances_by_id(instance_ids)
        for instance in instances:
            teeth.require_disk(instance, "stopped")
        with _engine_errors():
            self.nodes.stop(i.id for i in instances if i.state == "running")
        stopped = super().stop_instances(instance_ids)
        self._refresh_pids()
        return stopped

    def reboot_instances(self, instance_ids: list[str]) -> Any:
        running = [i.id for i in self.get_multi_instances_by_id(instance_ids) if i.is_running()]
        with _engine_errors():
            self.nodes.stop(running)
            self.nodes.start(running)
        self._refresh_pids()
        return super().reboot_instances(running)

    def terminate_instances(self, instance_ids: list[str]) -> Any:
        instances = self.get_multi_instances_by_id(instance_ids)
        alive = [i.id for i in instances if i.state != "terminated"]
        done = super().terminate_instances(alive) if alive else []
        for instance_id in alive:
            self.terminated_at[instance_id] = time.time()
            self.known.pop(instance_id, None)
            self._pids.pop(instance_id, None)
        with _engine_errors():
            # Also those that were terminated before: an earlier removal may have failed.
            self.nodes.remove(instance_ids)
        self._remove_unused_images()
        return [*done, *((i, i.instance_state) for i in instances if i.id not in alive)]

    def _refresh_pids(self) -> None:
        running = {i.id for i in self._alive() if i.state == "running"}
        self._pids = {
            instance_id: container.pid
            for instance_id, container in self.nodes.containers(self.region_name).items()
            if instance_id in running
        }


@contextmanager
def _engine_errors() -> Iterator[None]:
    """A failure of podman as EC2 would answer it."""
    try:
        yield
    except CloudError as error:
        raise EC2ClientError("InternalError", error.message) from None
