"""Several subnets, and capacity reservations: which zone a cluster is bought in, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.lifecycle.prepare import find_offers
from infra.ec2.purchase import NoCapacityError
from infra.ec2.reservations import find_open_reservations
from infra.errors import UsageError
from infra.instance_types import DEFAULT_INSTANCE_TYPE as METAL
from tests.harness.simulated_cloud import SimulatedCloud

ID = "cr-0123456789abcdef0"


def reservation(**changes: Any) -> str:
    keys = {"id": ID, "zone": "us-east-1c", "instance_type": METAL, "count": 3, **changes}
    return "[[reservation]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in keys.items()) + "\n"


def zones(cloud: SimulatedCloud, **options: Any) -> list[str]:
    offers = find_offers(cloud.ctx, cloud.plan_input(**options))
    return [offer.network.zone[-1] for offer in offers]


def test_several_subnets_are_tried_in_their_order(cloud: SimulatedCloud) -> None:
    found = cloud.ctx.clients.ec2.describe_subnets()["Subnets"]
    known = {each["AvailabilityZone"][-1]: each["SubnetId"] for each in found}
    wanted = (known["d"], known["a"])
    assert zones(cloud, nodes=2, subnet_ids=wanted) == ["d", "a", "d", "a"]
    cloud.up(nodes=2, subnet_ids=wanted)
    assert cloud.plan_input(nodes=3).spec.subnet_ids == wanted


def test_machines_are_bought_in_the_chosen_reservation_only(cloud: SimulatedCloud) -> None:
    # Nothing else has room.
    cloud.faults(reservation(match="targeted") + "[[capacity]]\nfree = 0\n")
    cluster = cloud.up(nodes=2, capacity_reservation=ID)
    assert {node.instance.zone for node in cluster.nodes} == {"us-east-1c"}
    target = {"CapacityReservationTarget": {"CapacityReservationId": ID}}
    for request in cloud.purchases():
        assert request["CapacityReservationSpecification"] == target
        assert "Placement" in request
    cloud.up(nodes=3)
    with pytest.raises(NoCapacityError, match="ReservationCapacityExceeded") as full:
        cloud.up(nodes=4)
    assert "--capacity-reservation none" in str(full.value.hint)
    assert full.value.may_pass, "--wait-for-capacity waits for it"
    cloud.faults(reservation(match="targeted"))
    assert len(cloud.up(nodes=4, capacity_reservation="none").nodes) == 4
    assert "CapacityReservationSpecification" not in cloud.purchases()[-1]


def test_an_open_reservation_comes_first(cloud: SimulatedCloud) -> None:
    cloud.faults(reservation())
    found = find_open_reservations(cloud.ctx.clients.ec2, [METAL], 3)
    assert [each.id for each in found] == [ID]
    cloud.up(nodes=2)
    for request in cloud.purchases():
        assert "CapacityReservationSpecification" not in request
        assert "Placement" in request
    (left,) = find_open_reservations(cloud.ctx.clients.ec2, [METAL], 1)
    assert left.free == 1


@pytest.mark.parametrize(
    "rule",
    [
        reservation(count=1),
        reservation(match="targeted"),
        reservation(state="expired"),
        reservation(platform="Windows"),
        reservation(interruptible=True),
    ],
)
def test_other_reservations_change_nothing(cloud: SimulatedCloud, rule: str) -> None:
    before = zones(cloud, nodes=2)
    cloud.faults(rule)
    assert zones(cloud, nodes=2) == before


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("", {}, "no such reservation in us-east-1"),
        (reservation(state="expired"), {}, "it is expired, not active"),
        (reservation(instance_type="m7i.metal-24xl"), {}, "it is for m7i.metal-24xl"),
        (reservation(platform="Windows"), {}, "it is for Windows, which this tool does not use"),
        (reservation(interruptible=True), {}, "it is interruptible, which this tool does not use"),
        (reservation(zone="us-east-1e"), {}, "it is in us-east-1e, which has no usable subnet"),
        (reservation(), {"market": "spot"}, "for on-demand machines, not for --market spot"),
    ],
)
def test_a_reservation_that_does_not_fit_is_refused(
    cloud: SimulatedCloud, rule: str, options: dict[str, Any], message: str
) -> None:
    cloud.faults(rule)
    with pytest.raises(UsageError, match=message):
        cloud.up(nodes=2, capacity_reservation=ID, **options)
    assert not cloud.purchases()
