"""RunInstances: a launch creates all of its instances or, if anything fails, none."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance

from infra.local.api import refusals
from infra.local.api.instances import podman_errors
from infra.local.api.runtime import Part
from infra.local.machines.containers import ContainerRequest, Seed, hostname_of, metadata_of
from infra.local.machines.host import choose_cpus
from infra.local.machines.podman import mac_of

# moto's placeholder for a missing client token.
_NO_CLIENT_TOKEN = "ABCDE"

Arguments = dict[str, Any]


@dataclass(frozen=True)
class LaunchRequest:
    """The parameters of a RunInstances request that moto drops.

    ``digest`` identifies all parameters; ``spot`` holds the spot options.
    """

    most: int = 1
    group: str = ""
    reservation: str = ""
    spot: Mapping[str, Any] = field(default_factory=dict)
    mappings: Sequence[Mapping[str, Any]] = ()
    digest: str = ""

    @staticmethod
    def of(param: Any, form: Mapping[str, Sequence[str]]) -> LaunchRequest:
        """Parse a request: ``param`` returns one parameter, ``form`` has all of them, flat."""
        given = {k: v for k, v in form.items() if k not in ("ClientToken", "DryRun")}
        digest = hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode())
        return LaunchRequest(
            most=int(param("MaxCount", 1)),
            group=param("Placement.GroupName", ""),
            reservation=param(
                "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId",
                "",
            ),
            spot=dict(param("InstanceMarketOptions.SpotOptions") or {}),
            mappings=param("BlockDeviceMappings", ()),
            digest=digest.hexdigest(),
        )


class Launches(Part):
    """A region's launches."""

    def __init__(self, ec2: Any) -> None:
        super().__init__(ec2)
        self._tokens: dict[str, tuple[str, str]] = {}
        """Digest of the request and reservation id, by client token."""
        self._request = LaunchRequest()

    @contextmanager
    def requested(self, request: LaunchRequest) -> Iterator[None]:
        """Provide :meth:`run` with the parameters that moto does not pass to it."""
        self._request = request
        try:
            yield
        finally:
            self._request = LaunchRequest()

    def run(
        self,
        image_id: str,
        least: int,
        user_data: Any,
        security_group_names: list[str],
        arguments: Arguments,
    ) -> Any:
        token = arguments.get("client_token") or _NO_CLIENT_TOKEN
        refusals.require_length("clientToken", token, 64)
        if same := self._find_launch(token):
            return same
        self._fill_in_subnet(arguments)
        image, public_key = self._require_parts(image_id, arguments)
        self._fill_in_root_device(arguments, image)
        count = self._grant(least, arguments)
        before = set(self._ec2.reservations)
        try:
            reservation = EC2Backend.run_instances(
                self._ec2, image_id, count, user_data, security_group_names, **arguments
            )
            for instance in reservation.instances:
                refusals.require_in_default_vpc(self._ec2, instance.vpc_id)
                self._complete(instance, arguments)
            market = "spot" if is_spot(arguments) else "on-demand"
            self._start_containers(reservation.instances, market, public_key, user_data)
        except Exception:
            for reservation_id in set(self._ec2.reservations) - before:
                self._undo(reservation_id)
            raise
        self._settle(reservation, token, arguments)
        return reservation

    def _find_launch(self, token: str) -> Any:
        """Return the earlier reservation of this token, if any, because clients retry lost requests.

        https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
        """
        digest, reservation_id = self._tokens.get(token, ("", ""))
        found = self._ec2.reservations.get(reservation_id)
        if found is not None and digest != self._request.digest:
            raise EC2ClientError(
                "IdempotentParameterMismatch",
                "Arguments on this idempotent request are inconsistent with arguments used in "
                "previous request(s).",
            )
        if found is not None and all(i.state == "terminated" for i in found.instances):
            # EC2 remembers tokens longer than it lists terminated instances.
            raise EC2ClientError(
                "IdempotentInstanceTerminated",
                "The instances that this client token launched have been terminated.",
            )
        return found

    def _require_parts(self, image_id: str, arguments: Arguments) -> tuple[Any, str]:
        """Return the image and the public key; refuse a request that refers to missing resources."""
        image = refusals.require_image(self._ec2, image_id)
        refusals.require_instance_type(self._ec2, arguments["instance_type"])
        public_key = refusals.require_key_pair(self._ec2, arguments.get("key_name"))
        refusals.require_idle_timeouts(arguments["nics"])
        groups = [*arguments.get("security_group_ids", [])]
        for nic in arguments["nics"]:
            groups += nic.get("Groups", [])
        refusals.require_groups(self._ec2, groups)
        zone = str(self._subnet_of(arguments).availability_zone)
        if self._request.group:
            self._ec2.placement_groups.require_zone(self._request.group, zone)
        return image, public_key

    def _fill_in_subnet(self, arguments: Arguments) -> None:
        """Use a default subnet if the request specifies none; moto would invent an address."""
        nics = arguments["nics"]
        first = next((n for n in nics if int(n.get("DeviceIndex", 0)) == 0), None)
        target, key = (arguments, "subnet_id") if first is None else (first, "SubnetId")
        if target.get(key):
            return
        subnets = self._ec2.get_default_subnets()
        target[key] = subnets[min(subnets)].id

    def _fill_in_root_device(self, arguments: Arguments, image: Any) -> None:
        """Set the root volume's defaults: the image's size, and deletion on termination."""
        given = self._request.mappings
        if not given:
            size_gib = refusals.require_root_size(image, None)
            ebs = {"VolumeSize": size_gib, "DeleteOnTermination": True}
            device = {"DeviceName": image.root_device_name, "Ebs": ebs}
            arguments["block_device_mappings"] = [device]
            return
        for asked, mapping in zip(given, arguments["block_device_mappings"], strict=True):
            if mapping["DeviceName"] == image.root_device_name:
                options, ebs = asked.get("Ebs", {}), mapping["Ebs"]
                ebs["DeleteOnTermination"] = options.get("DeleteOnTermination", True)
                size_gib = refusals.require_root_size(image, options.get("VolumeSize"))
                refusals.require_disk_speed(size_gib, options)
                ebs["VolumeSize"] = size_gib

    def _subnet_of(self, arguments: Arguments) -> Any:
        named = (n["SubnetId"] for n in arguments["nics"] if n.get("SubnetId"))
        return self._ec2.get_subnet(arguments.get("subnet_id") or next(named))

    def _grant(self, least: int, arguments: Arguments) -> int:
        """Return how many instances to launch, from MinCount to MaxCount."""
        subnet = self._subnet_of(arguments)
        refusals.require_in_default_vpc(self._ec2, subnet.vpc_id)
        refusals.require_offered(str(subnet.availability_zone), arguments["instance_type"])
        return self._allot(str(subnet.availability_zone), least, arguments)

    def _allot(self, zone: str, least: int, arguments: Arguments) -> int:
        if id_ := self._request.reservation:
            refusals.require_found((), [id_], *refusals.NO_RESERVATION)
        return max(least, self._request.most)

    def _complete(self, instance: Instance, arguments: Arguments) -> None:
        """Fill in attributes of a new instance that moto omits."""
        instance.launch_time = self._runtime.moto_now()
        asked = {int(nic.get("DeviceIndex", 0)): nic for nic in arguments["nics"]}
        for index, interface in instance.nics.items():
            interface.attach_time = instance.launch_time
            interface.mac_address = mac_of(interface.private_ip_address)
            nic = asked.get(index, {})
            interface.ena_srd_specification = nic.get("EnaSrdSpecification")
            interface.delete_on_termination = True
            interface.add_tags(arguments.get("tags", {}).get("network-interface", {}))
        speeds = {each["DeviceName"]: each.get("Ebs", {}) for each in self._request.mappings}
        for device, disk in instance.get_block_device_mapping:
            mib_s = speeds.get(device, {}).get("Throughput")
            self._ec2.volumes[disk.volume_id].throughput = int(mib_s or 125)
        if not instance.security_groups:
            instance.security_groups = list(instance.nics[0].group_set)
        if self._request.group:
            group = self._ec2.placement_groups.find(self._request.group)
            instance.placement.group_name = group.group_name
            instance.placement.group_id = group.id

    def _start_containers(
        self, instances: Sequence[Instance], market: str, public_key: str, user_data: Any
    ) -> None:
        all_cpus = choose_cpus(len(instances), self._ec2.lifecycle.cpus.values())
        content = base64.b64decode(str(user_data)) if user_data else b""
        requests = []
        for instance, cpus in zip(instances, all_cpus, strict=True):
            if not self._ec2.lifecycle.has_container(instance):
                continue
            address = instance.private_ip
            request = ContainerRequest(
                seed=Seed(
                    *(instance.id, hostname_of(address), public_key, content),
                    metadata_of(instance, market),
                ),
                address=address,
                cpus=cpus,
                region=self._ec2.place,
                image=self._ec2.images.disk_of(instance.image_id),
            )
            requests.append(request)
        with podman_errors():
            self._runtime.containers.launch(requests)
        self._ec2.lifecycle.cpus.update({r.seed.instance_id: r.cpus for r in requests})

    def _undo(self, reservation_id: str) -> None:
        """Remove all traces of a failed launch."""
        for instance in self._ec2.reservations[reservation_id].instances:
            if instance.state != "terminated":
                instance.terminate()
            self._ec2.forget_instance(instance.id)
        del self._ec2.reservations[reservation_id]

    def _settle(self, reservation: Any, token: str, arguments: Arguments) -> None:
        """Record a successful launch and boot its instances."""
        known = self._ec2.reservations
        self._tokens = {t: launch for t, launch in self._tokens.items() if launch[1] in known}
        if token != _NO_CLIENT_TOKEN:
            self._tokens[token] = (self._request.digest, reservation.id)
        tags = arguments.get("tags", {}).get("spot-instances-request", {})
        for instance in reservation.instances:
            if is_spot(arguments):
                self._ec2.spot_requests.add(instance, self._request.spot, tags)
            if profile := arguments.get("iam_instance_profile_name"):
                self._ec2.lifecycle.profiles[instance.id] = profile
            self._ec2.lifecycle.begin(instance)


def is_spot(arguments: Arguments) -> bool:
    return bool(arguments.get("instance_market_options") == "spot")
