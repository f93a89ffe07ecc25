"""Whether EC2 has, and grants, as many machines as a launch asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from infra.local.faults import CapacityRule, Faults

# What holds a machine, and what counts towards a quota ("running On-Demand Instances"):
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_HOLDING = ("pending", "running", "stopping", "shutting-down")
_COUNTING = ("pending", "running")
# GetServiceQuota's codes: "Running On-Demand Standard instances", "All Standard Spot Instance Requests".
ON_DEMAND_QUOTA, SPOT_QUOTA = "L-1216C47A", "L-34B43A08"


@dataclass(frozen=True)
class CapacityPool:
    """A kind of machine, as capacity and quotas see it. ``market`` is "spot" or "on-demand"."""

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

    def fits(self, rule: CapacityRule) -> bool:
        return rule.matches(self.zone, self.instance_type, self.market, grouped=self.grouped)


def grant(
    faults: Faults, instances: Iterable[Any], asked: CapacityPool, least: int, most: int
) -> int:
    """How many such machines a launch gets, from ``least`` to ``most``; EC2's refusal otherwise."""
    there = list(instances)
    allowed = _allowed(faults, there, asked)
    if allowed < least:
        raise _quota_refusal(asked, _quota(faults, asked.market))
    free = _free(faults, there, asked, most)
    if free < least:
        raise _capacity_refusal(asked)
    return min(most, allowed, free)


def _quota(faults: Faults, market: str) -> int:
    return faults.quota.spot_vcpus if market == "spot" else faults.quota.on_demand_vcpus


def _allowed(faults: Faults, there: list[Any], asked: CapacityPool) -> int:
    """How many more the quota allows; only a machine without known vCPUs counts for nothing."""
    running = [CapacityPool.of(i) for i in there if i.state in _COUNTING]
    used = sum(machine.vcpus for machine in running if machine.market == asked.market)
    return (_quota(faults, asked.market) - used) // max(asked.vcpus, 1)


def _free(faults: Faults, there: list[Any], asked: CapacityPool, most: int) -> int:
    """How many more the zone has: the first rule that matches says it, without one there are plenty."""
    rule = next((rule for rule in faults.capacity if asked.fits(rule)), None)
    if rule is None:
        return most
    holding = [CapacityPool.of(i) for i in there if i.state in _HOLDING]
    return rule.free - sum(machine.fits(rule) for machine in holding)


def _quota_refusal(asked: CapacityPool, quota: int) -> EC2ClientError:
    if asked.market == "spot":
        return EC2ClientError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    return EC2ClientError(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {quota} allows for "
        "the instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


class InsufficientCapacityError(EC2ClientError):
    """The zone has no such machine free. EC2 calls it a fault of its own, which SDKs try again:

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#api-error-codes-table-server
    """

    http_status = 500


def _capacity_refusal(asked: CapacityPool) -> EC2ClientError:
    offered = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(asked.zone[:-1], [])
    others = sorted(
        offering["Location"]
        for offering in offered
        if offering["InstanceType"] == asked.instance_type and offering["Location"] != asked.zone
    )
    return InsufficientCapacityError(
        "InsufficientInstanceCapacity",
        f"We currently do not have sufficient {asked.instance_type} capacity in the Availability "
        f"Zone you requested ({asked.zone}). Our system will be working on provisioning additional "
        f"capacity. You can currently get {asked.instance_type} capacity by not specifying an "
        f"Availability Zone in your request or choosing {', '.join(others)}.",
    )
