"""On-Demand Capacity Reservations: machines that the account pays for whether they run or not.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-reservations.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from infra.aws.clients import DENIED, error_code, unless
from infra.errors import UsageError

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import CapacityReservationTypeDef

    from infra.spec import ClusterSpec

# Of other reservations, a machine with Ubuntu uses none.
_PLATFORM, _TENANCY = "Linux/UNIX", "default"


@dataclass(frozen=True)
class Reservation:
    """A reservation with room for ``free`` machines."""

    id: str
    instance_type: str
    zone: str
    free: int

    @staticmethod
    def from_aws(found: CapacityReservationTypeDef) -> Reservation:
        return Reservation(
            id=found["CapacityReservationId"],
            instance_type=found["InstanceType"],
            zone=found["AvailabilityZone"],
            free=found["AvailableInstanceCount"],
        )


def find_reservation(ec2: EC2Client, spec: ClusterSpec) -> Reservation:
    """Return the reservation of ``--capacity-reservation``, whether it has room or not.

    Raises :class:`UsageError` if it can't be used, naming why.
    """
    id_ = str(spec.capacity_reservation)
    option, region = f"--capacity-reservation {id_}", ec2.meta.region_name
    try:
        (found,) = _describe(ec2, CapacityReservationIds=[id_])
    except ClientError as error:
        if not error_code(error).startswith("InvalidCapacityReservationId"):
            raise
        raise UsageError(
            f"{option}: no such reservation in {region}",
            hint=f"`aws ec2 describe-capacity-reservations --region {region}` lists them",
        ) from None
    if found["State"] != "active":
        raise UsageError(f"{option}: it is {found['State']}, not active")
    if why := _why_unusable(found):
        raise UsageError(f"{option}: it is {why}, which this tool does not use")
    reservation = Reservation.from_aws(found)
    if reservation.instance_type not in spec.instance_types:
        raise UsageError(
            f"{option}: it is for {reservation.instance_type}",
            hint=f"add --instance-type {reservation.instance_type}",
        )
    return reservation


def find_open_reservations(
    ec2: EC2Client, types: Sequence[str], missing: int
) -> tuple[Reservation, ...]:
    """Return the reservations that any matching launch uses, and that have room for ``missing`` machines.

    Returns none without permission to list them.
    """
    values = {
        "state": ["active"],
        "instance-match-criteria": ["open"],
        "instance-type": list(types),
    }
    filters = [{"Name": name, "Values": given} for name, given in values.items()]
    found = unless(DENIED, lambda: _describe(ec2, Filters=filters)) or ()
    usable = [each for each in found if not _why_unusable(each)]
    return tuple(each for each in map(Reservation.from_aws, usable) if each.free >= missing)


def _why_unusable(found: CapacityReservationTypeDef) -> str:
    """Return what a reservation is for, if not for machines as this tool buys them."""
    if found["InstancePlatform"] != _PLATFORM:
        return f"for {found['InstancePlatform']}"
    if found["Tenancy"] != _TENANCY:
        return f"for {found['Tenancy']} tenancy"
    if found.get("ReservationType", "default") != "default":
        return f"of type {found['ReservationType']}"
    if found.get("Interruptible"):
        return "interruptible"
    if arn := found.get("PlacementGroupArn"):
        return f"in placement group {arn.rpartition('/')[2]}"
    return ""


def _describe(ec2: EC2Client, **selection: Any) -> list[CapacityReservationTypeDef]:
    pages = ec2.get_paginator("describe_capacity_reservations").paginate(**selection)
    return [each for page in pages for each in page["CapacityReservations"]]
