"""Launches that need capacity, a quota, permissions, and luck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import Instance

from infra.local.api.instances import InstanceContainers
from infra.local.api.launches import Arguments, Launches, is_spot
from tests.cloud.authorization import key_requests, role_request
from tests.cloud.capacity import CapacityPool, choose_reservation, grant
from tests.cloud.faults import MachineRule, faults_of
from tests.cloud.prices import spot_usd


class LimitedLaunches(Launches):
    """A region's launches."""

    def __init__(self, ec2: Any) -> None:
        super().__init__(ec2)
        self._reserved = ""

    def _require_parts(self, image_id: str, arguments: Arguments) -> tuple[Any, str]:
        if is_spot(arguments):
            self._require_spot_role()
        found = super()._require_parts(image_id, arguments)
        if is_spot(arguments):
            self._require_price(arguments)
        return found

    def _require_price(self, arguments: Arguments) -> None:
        """Refuse a maximum price below the zone's current spot price."""
        highest = self._request.spot.get("MaxPrice")
        zone = str(self._subnet_of(arguments).availability_zone)
        price = round(spot_usd(faults_of(self._runtime), arguments["instance_type"], zone), 6)
        if highest is not None and float(highest) < price:
            raise EC2ClientError(
                "SpotMaxPriceTooLow",
                f"Your Spot request price of {highest} is lower than the minimum required Spot "
                f"request fulfillment price of {price}.",
            )

    def _require_spot_role(self) -> None:
        """Refuse a purchase if spot's role is missing and the caller can't create it.

        https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
        """
        faults = faults_of(self._runtime)
        if not faults.now.spot.service_linked_role and not faults.allows(role_request(self._ec2)):
            raise EC2ClientError(
                "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
                "The provided credentials do not have permission to create the service-linked role "
                "for EC2 Spot Instances.",
            )

    def _allot(self, zone: str, least: int, arguments: Arguments) -> int:
        pool = CapacityPool(
            zone=zone,
            instance_type=arguments["instance_type"],
            market="spot" if is_spot(arguments) else "on-demand",
            grouped=bool(self._request.group),
        )
        self._reserved = choose_reservation(self._ec2, pool, self._request.reservation, least)
        return grant(self._ec2, pool, least, max(least, self._request.most), self._reserved)

    def _complete(self, instance: Instance, arguments: Arguments) -> None:
        super()._complete(instance, arguments)
        instance.reservation_id_of_capacity = self._reserved

    def _start_containers(self, instances: Sequence[Instance], *more: Any) -> None:
        no_key = None if self._has_key() else MachineRule(fate="no-key")
        faults = faults_of(self._runtime)
        for instance in instances:
            if rule := (no_key or faults.next_fate(instance.placement.zone)):
                self._ec2.lifecycle.fates[instance.id] = rule
        super()._start_containers(instances, *more)

    def _has_key(self) -> bool:
        """Return whether the caller has permission to use the key that encrypts new disks."""
        faults = faults_of(self._runtime)
        key = faults.now.ebs.kms_key
        return not key or all(map(faults.allows, key_requests(self._ec2, key)))


class LimitedInstances(InstanceContainers):
    """A region's instances, which need capacity when they start again."""

    def start(self, instance_ids: list[str]) -> Any:
        for instance in self._ec2.get_multi_instances_by_id(instance_ids):
            if instance.state == "stopped":
                grant(self._ec2, CapacityPool.of(instance), 1, 1)
        return super().start(instance_ids)
