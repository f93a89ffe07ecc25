"""RunInstances of the embedded cloud: all that is asked for, as EC2 grants it, or nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import Instance

from infra.local import refusals
from infra.local.clock import as_moto_time
from infra.local.containers import ContainerRequest, NodeContainer
from infra.local.ec2_capacity import CapacityPool, grant
from infra.local.ec2_lifecycle import LifeBackend, podman_errors
from infra.local.host import choose_cpus
from infra.local.podman import mac_of
from infra.local.seed import Seed, hostname_of

# What moto puts in place of a client token that was not sent.
_NO_CLIENT_TOKEN = "ABCDE"


@dataclass(frozen=True)
class LaunchRequest:
    """What a RunInstances request asks for and moto does not hand on.

    ``digest`` tells requests with different parameters apart; ``spot`` holds a spot request's options.
    """

    most: int = 1
    group: str = ""
    spot: Mapping[str, Any] = field(default_factory=dict)
    mappings: Sequence[Mapping[str, Any]] = ()
    digest: str = ""

    @staticmethod
    def of(param: Any, form: Mapping[str, Sequence[str]]) -> LaunchRequest:
        """From a request: ``param`` reads one of its parameters, ``form`` has all of them, flat."""
        told = {k: v for k, v in form.items() if k not in ("ClientToken", "DryRun")}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
        return LaunchRequest(
            most=int(param("MaxCount", 1)),
            group=param("Placement.GroupName") or param("Placement.GroupId") or "",
            spot=dict(param("InstanceMarketOptions.SpotOptions") or {}),
            mappings=param("BlockDeviceMappings", ()),
            digest=digest.hexdigest(),
        )


class LaunchBackend(LifeBackend):
    """How machines come to be; every one is a container."""

    def __init__(self, region_name: str, account_id: str) -> None:
        self.tokens: dict[str, tuple[str, str]] = {}
        """Digest of the request and reservation, by client token."""
        self._wish = LaunchRequest()
        super().__init__(region_name, account_id)

    @contextmanager
    def asked(self, wish: LaunchRequest) -> Iterator[None]:
        """The part of the request in hand that moto does not pass to :meth:`run_instances`."""
        self._wish = wish
        try:
            yield
        finally:
            self._wish = LaunchRequest()

    def run_instances(
        self,
        image_id: str,
        count: int,
        user_data: Any,
        security_group_names: list[str],
        **kwargs: Any,
    ) -> Any:
        token = kwargs.get("client_token") or _NO_CLIENT_TOKEN
        if same := self._find_launch(token):
            return same
        self._fill_in_subnet(kwargs)
        image, public_key = self._require_parts(image_id, kwargs)
        self._fill_in_root_device(kwargs, image)
        count = self._grant(count, kwargs)
        before = set(self.reservations)
        try:
            reservation = super().run_instances(
                image_id, count, user_data, security_group_names, **kwargs
            )
            for instance in reservation.instances:
                refusals.require_in_default_vpc(self, instance.vpc_id)
                self._complete(instance, kwargs)
            self._launch(reservation.instances, public_key, user_data)
        except Exception:
            for reservation_id in set(self.reservations) - before:
                self._forget(reservation_id)
            raise
        self._settle_launch(reservation, token, kwargs)
        return reservation

    def _find_launch(self, token: str) -> Any:
        """What this token has launched already: clients send a request again when in doubt.

        https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
        """
        digest, reservation_id = self.tokens.get(token, ("", ""))
        found = self.reservations.get(reservation_id)
        if found is not None and digest != self._wish.digest:
            raise EC2ClientError(
                "IdempotentParameterMismatch",
                "Arguments on this idempotent request are inconsistent with arguments used in "
                "previous request(s).",
            )
        if found is not None and all(i.state == "terminated" for i in found.instances):
            # EC2 remembers the token longer than it shows the machines.
            raise EC2ClientError(
                "IdempotentInstanceTerminated",
                "The instances that this client token launched have been terminated.",
            )
        return found

    def _require_parts(self, image_id: str, kwargs: dict[str, Any]) -> tuple[Any, str]:
        """The image and the public key, where all that the request names exists."""
        image = refusals.require_image(self, image_id)
        refusals.require_instance_type(self, kwargs["instance_type"])
        public_key = refusals.require_key_pair(self, kwargs.get("key_name"))
        groups = [*kwargs.get("security_group_ids", [])]
        for nic in kwargs["nics"]:
            groups += nic.get("Groups", [])
        refusals.require_groups(self, groups)
        if self._wish.group:
            subnet = self._subnet_of(kwargs)
            zone = str(subnet.availability_zone) if subnet else ""
            self.require_group_in_zone(self._wish.group, zone)
        if kwargs.get("instance_market_options") == "spot":
            self.require_spot_price(self._wish.spot)
        return image, public_key

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

    def _fill_in_root_device(self, kwargs: dict[str, Any], image: Any) -> None:
        """The root volume goes with its instance, and is as large as the image, unless asked otherwise."""
        if not self._wish.mappings and not kwargs.get("launch_template"):
            ebs = {
                "VolumeSize": refusals.require_root_size(image, None),
                "DeleteOnTermination": True,
            }
            kwargs["block_device_mappings"] = [{"DeviceName": image.root_device_name, "Ebs": ebs}]
            return
        for wish, mapping in zip(
            self._wish.mappings, kwargs.get("block_device_mappings", []), strict=True
        ):
            if mapping["DeviceName"] == image.root_device_name:
                asked, ebs = wish.get("Ebs", {}), mapping["Ebs"]
                ebs["DeleteOnTermination"] = asked.get("DeleteOnTermination", True)
                ebs["VolumeSize"] = refusals.require_root_size(image, asked.get("VolumeSize"))

    def _subnet_of(self, kwargs: dict[str, Any]) -> Any:
        """The subnet of a launch; ``None`` where it is that of an interface that exists."""
        named = next((n["SubnetId"] for n in kwargs["nics"] if n.get("SubnetId")), None)
        subnet_id = kwargs.get("subnet_id") or named
        return self.get_subnet(subnet_id) if subnet_id else None

    def _grant(self, least: int, kwargs: dict[str, Any]) -> int:
        """How many machines there will be, from MinCount to MaxCount."""
        subnet = self._subnet_of(kwargs)
        if subnet is None:
            return least  # into an interface that exists, so there can be one only
        refusals.require_in_default_vpc(self, subnet.vpc_id)
        asked = CapacityPool(
            zone=str(subnet.availability_zone),
            instance_type=kwargs["instance_type"],
            market="spot" if kwargs.get("instance_market_options") == "spot" else "on-demand",
            grouped=bool(self._wish.group),
        )
        refusals.require_offered(asked.zone, asked.instance_type)
        return grant(self.faults.now, self._alive(), asked, least, max(least, self._wish.most))

    def require_room(self, instance: Instance) -> None:
        """A stopped machine needs room again where it was."""
        grant(self.faults.now, self._alive(), CapacityPool.of(instance), 1, 1)

    def _complete(self, instance: Instance, kwargs: dict[str, Any]) -> None:
        """Give a new instance what moto leaves out."""
        instance.launch_time = as_moto_time(self.clock.time())
        asked = {int(nic.get("DeviceIndex", 0)): nic for nic in kwargs["nics"]}
        for index, interface in instance.nics.items():
            interface.attach_time = instance.launch_time
            interface.mac_address = mac_of(interface.private_ip_address)
            nic = asked.get(index, {})
            if "NetworkInterfaceId" not in nic:
                keep = str(nic.get("DeleteOnTermination", True)).lower() == "false"
                interface.delete_on_termination = not keep
                interface.add_tags(kwargs.get("tags", {}).get("network-interface", {}))
        if not instance.security_groups:
            instance.security_groups = list(instance.nics[0].group_set)
        if self._wish.group:
            group = self.find_placement_group(self._wish.group)
            instance.placement.group_name = group.group_name
            instance.placement.group_id = group.id

    def _launch(self, instances: Sequence[Instance], public_key: str, user_data: Any) -> None:
        in_use = [node.cpus for node in self.known.values()]
        content = base64.b64decode(str(user_data)) if user_data else b""
        requests = []
        for instance, cpus in zip(instances, choose_cpus(len(instances), in_use), strict=True):
            self.draw_fate(instance)
            if not self.has_container(instance):
                continue
            address = instance.private_ip
            seed = Seed(instance.id, hostname_of(address), public_key, content)
            disk = self.disk_of(instance.image_id)
            node = NodeContainer(instance.id, address, cpus)
            requests.append(
                ContainerRequest(
                    node,
                    self.region_name,
                    disk,
                    seed,
                    mask_ssh=self.fate_of(instance.id) == "no-ssh",
                )
            )
        with podman_errors():
            self.containers.launch(requests)
        self.known.update({request.node.instance_id: request.node for request in requests})

    def _forget(self, reservation_id: str) -> None:
        """Undo a launch that failed, as if it had never been asked for."""
        for instance in self.reservations[reservation_id].instances:
            if instance.state != "terminated":
                instance.terminate()
            self.known.pop(instance.id, None)
            self.fates.pop(instance.id, None)
            self.tags.pop(instance.id, None)
        del self.reservations[reservation_id]

    def _settle_launch(self, reservation: Any, token: str, kwargs: dict[str, Any]) -> None:
        """The launch has succeeded: remember it, and let the machines boot."""
        if token != _NO_CLIENT_TOKEN:
            self.tokens[token] = (self._wish.digest, reservation.id)
        spot_tags = kwargs.get("tags", {}).get("spot-instances-request", {})
        for instance in reservation.instances:
            if kwargs.get("instance_market_options") == "spot":
                self.add_spot_request(instance, self._wish.spot, spot_tags)
            self.live(instance)
