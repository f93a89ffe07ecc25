"""Capacity and quotas: how many instances EC2 grants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from infra.local.api.quotas import SPOT_QUOTA, LocalQuotas
from tests.cloud.faults import ActiveFaults, Faults, ReservationRule, faults_of

# The states that occupy capacity, and the states that count toward a quota ("running On-Demand Instances"):
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_HOLDING = ("pending", "running", "stopping", "shutting-down")
_COUNTING = ("pending", "running")


@dataclass(frozen=True)
class CapacityPool:
    """A zone, type, and market ("spot" or "on-demand") whose instances compete for capacity."""

    zone: str
    instance_type: str
    market: str
    grouped: bool

    @staticmethod
    def of(instance: Any) -> CapacityPool:
        return CapacityPool(
            zone=str(instance.placement.zone),
            instance_type=instance.instance_type,
            market="spot" if instance.lifecycle == "spot" else "on-demand",
            grouped=bool(instance.placement.group_name),
        )

    @property
    def vcpus(self) -> int:
        known = INSTANCE_TYPES.get(self.instance_type, {})
        return int(known.get("VCpuInfo", {}).get("DefaultVCpus", 0))


def room_in(ec2: Any, rule: ReservationRule) -> int:
    """Return how many more instances a reservation has room for."""
    used = sum(
        getattr(instance, "reservation_id_of_capacity", "") == rule.id
        and instance.state in _HOLDING
        for instance in ec2.live_instances()
    )
    return max(0, rule.count - used) if rule.state == "active" else 0


def choose_reservation(ec2: Any, pool: CapacityPool, target: str, least: int) -> str:
    """Return the reservation that a launch uses: its target, else an open one with room, else "".

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-launch.html
    """
    rules: tuple[ReservationRule, ...] = faults_of(ec2.runtime).now.reservation
    asked = (pool.zone, pool.instance_type, "Linux/UNIX")
    fits = [r for r in rules if (r.zone, r.instance_type, r.platform) == asked]
    if pool.market == "spot":
        fits = []
    if not target:
        has_room = (r.id for r in fits if r.match == "open" and room_in(ec2, r) >= least)
        return next(has_room, "")
    wanted = next((r for r in rules if r.id == target), None)
    if wanted is None:
        raise EC2ClientError(
            "InvalidCapacityReservationId.NotFound",
            f"The capacity reservation '{target}' does not exist.",
        )
    if wanted not in fits:
        raise EC2ClientError(
            "InvalidParameterCombination",
            f"The attributes of the launch do not match those of the capacity reservation '{target}'.",
        )
    if room_in(ec2, wanted) < least:
        raise EC2ClientError(
            "ReservationCapacityExceeded",
            f"The requested reservation does not have sufficient compatible and available capacity for "
            f"this request: {target}",
        )
    return target


def render_reservation(ec2: Any, rule: ReservationRule) -> dict[str, Any]:
    """Return a reservation as DescribeCapacityReservations shows it."""
    return {
        "CapacityReservationId": rule.id,
        "OwnerId": ec2.account_id,
        "InstanceType": rule.instance_type,
        "InstancePlatform": rule.platform,
        "AvailabilityZone": rule.zone,
        "Tenancy": "default",
        "TotalInstanceCount": rule.count,
        "AvailableInstanceCount": room_in(ec2, rule),
        "State": rule.state,
        "InstanceMatchCriteria": rule.match,
        "Interruptible": rule.interruptible,
    }


def grant(ec2: Any, pool: CapacityPool, least: int, most: int, reservation: str = "") -> int:
    """Return how many instances a launch gets, from ``least`` to ``most``, or refuse the launch."""
    faults: Faults = faults_of(ec2.runtime).now
    there = ec2.live_instances()
    quota = faults.quota.spot_vcpus if pool.market == "spot" else faults.quota.on_demand_vcpus
    running = [CapacityPool.of(i) for i in there if i.state in _COUNTING]
    used = sum(other.vcpus for other in running if other.market == pool.market)
    # An instance type with an unknown number of vCPUs uses none.
    allowed = (quota - used) // max(pool.vcpus, 1)
    if allowed < least:
        raise _quota_refusal(pool, quota)
    free = most if reservation else _free(faults, there, pool, most)
    if free < least:
        raise _capacity_refusal(pool)
    return min(most, allowed, free)


def _free(faults: Faults, there: list[Any], pool: CapacityPool, most: int) -> int:
    """Return the free capacity by the first matching rule; without one, there is enough."""
    rule = next((rule for rule in faults.capacity if rule.matches(pool)), None)
    if rule is None:
        return most
    holding = [CapacityPool.of(i) for i in there if i.state in _HOLDING]
    return rule.free - sum(rule.matches(other) for other in holding)


def _quota_refusal(pool: CapacityPool, quota: int) -> EC2ClientError:
    if pool.market == "spot":
        return EC2ClientError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    return EC2ClientError(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {quota} allows for "
        "the instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


class InsufficientCapacityError(EC2ClientError):
    """The zone has no capacity left. EC2 reports this as a server error, which SDKs retry.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#api-error-codes-table-server
    """

    http_status = 500


def _capacity_refusal(pool: CapacityPool) -> EC2ClientError:
    offered = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(pool.zone[:-1], [])
    others = sorted(
        offering["Location"]
        for offering in offered
        if offering["InstanceType"] == pool.instance_type and offering["Location"] != pool.zone
    )
    return InsufficientCapacityError(
        "InsufficientInstanceCapacity",
        f"We currently do not have sufficient {pool.instance_type} capacity in the Availability "
        f"Zone you requested ({pool.zone}). Our system will be working on provisioning additional "
        f"capacity. You can currently get {pool.instance_type} capacity by not specifying an "
        f"Availability Zone in your request or choosing {', '.join(others)}.",
    )


class FaultyQuotas(LocalQuotas):
    """EC2's two quotas, with values from the active faults."""

    def __init__(self, region_name: str, account_id: str, *, faults: ActiveFaults) -> None:
        super().__init__(region_name, account_id)
        self._faults = faults

    def value_of(self, quota_code: str) -> float:
        quota = self._faults.now.quota
        return quota.spot_vcpus if quota_code == SPOT_QUOTA else quota.on_demand_vcpus
