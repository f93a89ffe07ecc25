"""EC2's state, kept by moto, with a container behind every instance and an image behind every AMI.

moto's methods answer the API's calls; the overrides here do the same to the containers, and put
right what moto leaves different from EC2. Everything runs under the server's one lock.
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instances import Instance
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix

from infra.errors import CloudError
from infra.local import refusals, responses
from infra.local.clock import ServerClock
from infra.local.containers import NodeContainers
from infra.local.ec2_instances import InstancesBackend
from infra.local.ec2_lifecycle import set_reason
from infra.local.faults_in_force import FaultsInForce
from infra.local.host import choose_range, used_ranges

# EC2 shows a terminated instance for about an hour:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
_TERMINATED_VISIBLE_S = 3600.0
# How the kernel ends the first process of a container: see SYS_BOOT in podman.py.
_EXIT_REBOOT, _EXIT_POWER_OFF = 129, 130


def hide_invented_addresses() -> None:
    """Make moto show a node's real address as its public one.

    moto invents public addresses, and they belong to strangers: none may ever reach an answer.
    """

    def show_private_address(interface: Any) -> None:
        if str(interface.public_ip_auto_assign).lower() == "true":
            interface.public_ip = interface.private_ip_address

    NetworkInterface.check_auto_public_ip = show_private_address
    # This name exists in the public DNS, where it means a stranger's machine.
    Instance.public_dns_name = property(lambda _instance: "")


class LocalEC2Backend(InstancesBackend):
    """One region's EC2: its default VPC, and how it keeps up with what the nodes do themselves."""

    def __init__(
        self,
        region_name: str,
        account_id: str,
        *,
        containers: NodeContainers,
        clock: ServerClock,
        faults: FaultsInForce,
    ) -> None:
        self.containers, self.clock, self.faults = containers, clock, faults
        self.born: dict[str, float] = {}
        """When each resource was made, by its id: what is new is not seen everywhere."""
        self.vpc_range = choose_range(
            [*used_ranges(), *(r for n in containers.podman.networks() for r in n.ranges)]
        )
        containers.ensure_network(region_name, self.vpc_range)
        super().__init__(region_name, account_id)

    @property
    def _url_module(self) -> Any:
        """moto looks for the API's URLs beside a backend's own module; they lead to our answers."""
        return responses

    # The state survives the server; what belongs to the running process does not.

    def __getstate__(self) -> dict[str, Any]:
        process: dict[str, Any] = {
            "containers": None,
            "clock": None,
            "faults": None,
            "_commits": {},
            "_pids": {},
        }
        return {**self.__dict__, **process}

    def resume(
        self,
        containers: NodeContainers,
        clock: ServerClock,
        faults: FaultsInForce,
        *,
        suspended: bool,
    ) -> None:
        """Take up a saved state: make the containers what it says, as far as they still exist.

        Nodes that were stopped from outside (``suspended``, or a crash of this machine) run again;
        one that ended itself meanwhile is treated as such.
        """
        self.containers, self.clock, self.faults = containers, clock, faults
        containers.ensure_network(self.region_name, self.vpc_range)
        found = containers.containers(self.region_name)
        # A crash in the midst of a launch leaves containers that no answer ever told of.
        housed = [instance for instance in self._alive() if self.has_container(instance)]
        containers.remove(found.keys() - {instance.id for instance in housed})
        for instance in housed:
            container = found.get(instance.id)
            if container is None:
                self._vanish(instance)
            elif instance.state in ("pending", "running") and not container.running:
                if container.exit_code == _EXIT_POWER_OFF and not suspended:
                    self._shut_down(instance)
                else:
                    self._start_again(instance)
        self._resume_images()
        self._refresh_pids()

    # The default VPC

    def create_default_vpc(self) -> Any:
        vpc = self.create_vpc(cidr_block=str(self.vpc_range), is_default=True)
        for zone in self.describe_availability_zones():
            subnet = self.create_default_subnet(zone.name)
            # moto skips these by having used them up; after a restart it would hand them out, and
            # the first of them is the gateway.
            subnet._reserved_ips.update(subnet.aws_reserved_ips)
        return vpc

    def allocate_address(self, *_: Any, **__: Any) -> Any:
        raise EC2ClientError(
            "AddressLimitExceeded",
            "The embedded cloud has no public addresses: an instance's private one is reachable",
        )

    # Keeping up with the containers

    def reconcile(self) -> bool:
        """Take note of what happened by itself; returns whether the state changed."""
        changed = self.pass_time() | self._finish_commits() | self._forget_long_terminated()
        alive = self.containers.podman.is_alive
        if all(alive(pid) for pid in self._pids.values()):
            return changed
        containers = self.containers.containers(self.region_name)
        rebooting = {commit.rebooting for commit in self._commits.values()}
        for instance in self._alive():
            container = containers.get(instance.id)
            if instance.state != "running" or instance.id in rebooting:
                continue
            if container is None:
                self._vanish(instance)
            elif not container.running and container.exit_code == _EXIT_REBOOT:
                self._start_again(instance)
            elif not container.running:
                self._shut_down(instance)
        self._refresh_pids()
        return True

    def _shut_down(self, instance: Instance) -> None:
        """An instance ended itself: it stops or goes, as its launch asked for."""
        if instance.instance_initiated_shutdown_behavior == "terminate":
            self.terminate_instances([instance.id])
        else:
            instance.stop()
        set_reason(instance, "Client.InstanceInitiatedShutdown", "Instance initiated shutdown")

    def _vanish(self, instance: Instance) -> None:
        """A container was removed behind our back, and its disk with it."""
        self.terminate_instances([instance.id])
        set_reason(instance, "Server.InternalError", "the instance's container was removed")

    def _start_again(self, instance: Instance) -> None:
        try:
            self.containers.start([instance.id])
        except CloudError as error:
            instance.stop()
            set_reason(instance, "Server.InternalError", error.message)

    def _forget_long_terminated(self) -> bool:
        limit = self.clock.time() - _TERMINATED_VISIBLE_S
        old = {id_ for id_, at in self.terminated_at.items() if at < limit}
        if not old:
            return False
        for reservation_id, reservation in list(self.reservations.items()):
            reservation.instances = [i for i in reservation.instances if i.id not in old]
            if not reservation.instances:
                del self.reservations[reservation_id]
        self.tokens = {
            t: launch for t, launch in self.tokens.items() if launch[1] in self.reservations
        }
        for instance_id in old:
            for known in (self.terminated_at, self.fates, self.born, self.tags):
                known.pop(instance_id, None)
            if request := self.spot_request_of(instance_id):
                del self.spot_instance_requests[request.id]
        return True

    # What a machine tells of itself

    def console_of(self, instance: Instance) -> str:
        """What cloud-init writes to the console; nothing before the first boot has made the keys.

        https://cloudinit.readthedocs.io/en/latest/reference/modules.html#keys-to-console
        """
        pid = self._pids.get(instance.id)
        keys = self.containers.host_keys(instance.id, pid) if pid else ()
        if not keys:
            return ""
        block = ("-----BEGIN SSH HOST KEY KEYS-----", *keys, "-----END SSH HOST KEY KEYS-----")
        return "\n".join(block) + "\n"

    def describe_tags(self, filters: dict[str, list[str]] | None = None) -> Any:
        """moto compares every tag with a pattern for each resource that it shows; ids need none."""
        ids = (filters or {}).get("resource-id", [])
        if (
            not filters
            or filters.keys() != {"resource-id"}
            or any(set("*?[") & set(i) for i in ids)
        ):
            return super().describe_tags(filters)
        return [
            {
                "resource_id": id_,
                "key": key,
                "value": value,
                "resource_type": EC2_PREFIX_TO_RESOURCE.get(get_prefix(id_), ""),
            }
            for id_ in ids
            for key, value in self.tags.get(id_, {}).items()
        ]

    # Security groups

    def delete_security_group(self, name: str | None = None, group_id: str | None = None) -> None:
        if name and not group_id:
            group = self.get_security_group_by_name_or_id(name)
            group_id = group.id if group else None
        if group_id:
            refusals.require_unused_group(self, group_id)
        super().delete_security_group(name, group_id)

    # moto keeps an instance's groups and its interfaces' apart, and shows the sum of both.

    def modify_network_interface_attribute(
        self, eni_id: str, group_ids: list[str], *more: Any, **named: Any
    ) -> None:
        refusals.require_groups(self, group_ids)
        super().modify_network_interface_attribute(eni_id, group_ids, *more, **named)
        interface = self.get_network_interface(eni_id)
        if group_ids and interface.instance and interface.device_index == 0:
            interface.instance.security_groups = list(interface._group_set)

    def modify_instance_security_groups(
        self, instance_id: str, new_group_id_list: list[str]
    ) -> Any:
        refusals.require_groups(self, new_group_id_list)
        instance = super().modify_instance_security_groups(instance_id, new_group_id_list)
        instance.nics[0]._group_set = list(instance.security_groups)
        return instance
