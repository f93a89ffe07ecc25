"""On-Demand Capacity Reservations: machines that the account pays for whether they run or not.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-reservations.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from infra.aws.clients import DENIED, error_code
from infra.errors import UsageError
from infra.words import counted

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import CapacityReservationTypeDef

    from infra.spec import ClusterSpec


@dataclass(frozen=True)
class Reservation:
    """A reservation with room for ``free`` machines; only machines of its placement group fit, if any."""

    id: str
    instance_type: str
    zone: str
    free: int
    group: str = ""

    @staticmethod
    def from_aws(found: CapacityReservationTypeDef) -> Reservation:
        return Reservation(
            id=found["CapacityReservationId"],
            instance_type=found["InstanceType"],
            zone=found["AvailabilityZone"],
            free=found["AvailableInstanceCount"],
            group=found.get("PlacementGroupArn", "").rpartition("/")[2],
        )


def find_reservation(ec2: EC2Client, spec: ClusterSpec, missing: int) -> Reservation:
    """Return the reservation of ``--capacity-reservation``, if it has room for ``missing`` machines.

    Raises :class:`UsageError` otherwise, naming what would fit.
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
    reservation = Reservation.from_aws(found)
    if reservation.instance_type not in spec.instance_types:
        raise UsageError(
            f"{option}: it is for {reservation.instance_type}",
            hint=f"add --instance-type {reservation.instance_type}",
        )
    if reservation.free < missing:
        room = counted(reservation.free, "machine")
        raise UsageError(
            f"{option}: it has room for {room}; {missing} are missing",
            hint="use fewer --nodes, or --capacity-reservation none",
        )
    return reservation


def find_open_reservations(
    ec2: EC2Client, types: Sequence[str], missing: int
) -> tuple[Reservation, ...]:
    """Return the reservations that any matching launch uses, and that have room for ``missing`` machines.

    A launch into a placement group uses none of them. Returns none without permission to list them.
    """
    values = {
        "state": ["active"],
        "instance-match-criteria": ["open"],
        "instance-type": list(types),
        "tenancy": ["default"],
    }
    filters = [{"Name": name, "Values": given} for name, given in values.items()]
    try:
        found = [Reservation.from_aws(each) for each in _describe(ec2, Filters=filters)]
    except ClientError as error:
        if error_code(error) not in DENIED:
            raise
        return ()
    return tuple(each for each in found if each.free >= missing and not each.group)


def _describe(ec2: EC2Client, **selection: Any) -> list[CapacityReservationTypeDef]:
    pages = ec2.get_paginator("describe_capacity_reservations").paginate(**selection)
    return [each for page in pages for each in page["CapacityReservations"]]
