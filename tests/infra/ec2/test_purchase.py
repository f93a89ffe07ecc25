"""The purchase: one call for all machines, fallbacks, retries, and tokens."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from infra.ec2.purchase import NoCapacityError, Refusal, buy, client_token, render_request
from infra.errors import CloudError
from infra.instance_types import INSTANCE_TYPES
from tests.infra.plan_inputs import make_spec
from tests.infra.price_market import (
    METAL,
    SECOND,
    Market,
    error,
    make_purchase,
    offers_of,
    purchase_by,
)


@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "Unsupported"])
def test_without_capacity_the_next_offer_is_tried(code: str) -> None:
    market = Market(lambda r: error(code) if r["InstanceType"] == METAL else "pending")

    offer, _ = purchase_by(market, make_spec(2, instance_types=(METAL, SECOND)))

    assert offer.type.name == SECOND
    assert market.tried() == [
        (METAL, "subnet-a", "on-demand", True),
        (METAL, "subnet-b", "on-demand", True),
        (METAL, "subnet-a", "on-demand", False),
        (METAL, "subnet-b", "on-demand", False),
        (SECOND, "subnet-b", "on-demand", True),
    ]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("code", ["VcpuLimitExceeded", "InvalidPlacementGroup.InUse"])
def test_what_ending_machines_hold_is_waited_for_once(code: str, ended: bool) -> None:
    waits: list[bool] = []
    market = Market(lambda r: "pending" if waits == [True] else error(code))
    client: Any = market
    spec = make_spec(2, instance_types=(METAL, SECOND))
    offers = offers_of(spec)

    def wait() -> bool:
        waits.append(ended)
        return ended

    with contextlib.nullcontext() if ended else pytest.raises(NoCapacityError):
        offer, _ = buy(client, make_purchase(spec), offers, wait_for_end=wait)
        assert offer == offers[0]
    assert waits == [ended]


@pytest.mark.parametrize(
    ("code", "after"),
    [
        ("ReservationCapacityExceeded", []),
        # Without the group, the nodes would keep half the bandwidth.
        ("InvalidPlacementGroup.InUse", [1]),
    ],
)
def test_only_the_group_is_waited_for_before_the_next_offer(code: str, after: list[int]) -> None:
    waits: list[int] = []
    market = Market(lambda r: error(code) if "InstanceMarketOptions" in r else "pending")
    client: Any = market
    spec = make_spec(2, market="spot-or-on-demand")

    def wait() -> bool:
        waits.append(len(market.requests))
        return False

    offer, _ = buy(client, make_purchase(spec), offers_of(spec), wait_for_end=wait)

    assert (offer.market, waits) == ("on-demand", after)


def test_another_zone_has_the_same_quota() -> None:
    code = "VcpuLimitExceeded"
    market = Market(lambda r: error(code) if r["InstanceType"] == METAL else "pending")

    offer, machines = purchase_by(market, make_spec(3, instance_types=(METAL, SECOND)), count=3)

    assert (offer.type.name, len(machines)) == (SECOND, 3)
    assert [request["InstanceType"] for request in market.requests] == [METAL, SECOND]


@pytest.mark.parametrize(
    ("code", "tries"), [("MaxSpotInstanceCountExceeded", 1), ("SpotMaxPriceTooLow", 2)]
)
def test_what_spot_refuses_may_be_had_on_demand(code: str, tries: int) -> None:
    market = Market(lambda r: error(code) if "InstanceMarketOptions" in r else "pending")

    offer, _ = purchase_by(market, make_spec(2, market="spot-or-on-demand"))

    assert offer.market == "on-demand"
    assert [tried[2] for tried in market.tried()] == [*["spot"] * tries, "on-demand"]
    with pytest.raises(NoCapacityError):
        purchase_by(market, make_spec(2, market="spot"))


def test_whatever_was_tried_is_listed_with_ec2s_own_words() -> None:
    result: list[Refusal] = []
    spec = make_spec(2, instance_types=(METAL, SECOND))
    market = Market(
        lambda r: (
            error("VcpuLimitExceeded", "limit of 64")
            if r["InstanceType"] == SECOND
            else error("InsufficientInstanceCapacity", f"none in {len(market.requests)}")
        )
    )
    client: Any = market

    with pytest.raises(NoCapacityError) as caught:
        buy(client, make_purchase(spec), offers_of(spec), on_refusal=result.append)

    assert caught.value.message.splitlines() == [
        "no single zone has capacity for 2 machines; tried:",
        f"  {METAL} in us-east-1a, in the placement group: InsufficientInstanceCapacity: none in 1",
        f"  {METAL} in us-east-1b, in the placement group: InsufficientInstanceCapacity: none in 2",
        f"  {METAL} in us-east-1a: InsufficientInstanceCapacity: none in 3",
        f"  {METAL} in us-east-1b: InsufficientInstanceCapacity: none in 4",
        f"  {SECOND} in us-east-1b, in the placement group: VcpuLimitExceeded: limit of 64",
    ]
    assert "L-1216C47A" in str(caught.value)
    assert caught.value.code == "InsufficientInstanceCapacity"
    assert tuple(result) == caught.value.refusals
    large = replace(offers_of(spec)[0], type=INSTANCE_TYPES["x8i.96xlarge"])
    for offer, code, hint in (
        (offers_of(spec)[0], "MaxSpotInstanceCountExceeded", "L-34B43A08"),
        (offers_of(spec)[0], "SpotMaxPriceTooLow", "--max-price"),
        (large, "VcpuLimitExceeded", "x8i.96xlarge has its own quota"),
    ):
        assert hint in str(NoCapacityError(2, [Refusal(offer, code, "no")]))


# Once, and only once


def test_the_token_depends_on_the_request_and_the_known_machines() -> None:
    spec = make_spec(2)
    first, (offer, other) = make_purchase(spec), offers_of(spec)[:2]
    request, known = render_request(first, offer), first.known

    token = client_token(request, known, 0)

    assert token == client_token(render_request(first, offer), frozenset({"i-0"}), 0)
    assert len(token) <= 64
    larger = render_request(replace(first, count=3), offer)
    different = {
        *(token, client_token(render_request(first, other), known, 0)),
        *(client_token(larger, known, 0), client_token(request, frozenset({"i-0", "i-1"}), 0)),
        *(client_token(request, frozenset(), 0), client_token(request, known, 1)),
    }
    assert len(different) == 6


@pytest.mark.parametrize(
    "failure",
    [
        error("RequestLimitExceeded"),
        error("InvalidAMIID.NotFound"),
        error("InvalidPlacementGroup.Unknown"),
        EndpointConnectionError(endpoint_url="https://ec2"),
    ],
    ids=str,
)
def test_the_very_same_request_is_sent_again_until_it_is_answered(failure: Exception) -> None:
    market = Market(lambda _: failure if len(market.requests) < 3 else "pending")

    purchase_by(market, make_spec(2))

    first, second, third = market.requests
    assert first == second == third


@pytest.mark.parametrize(
    ("code", "most"), [("InvalidAMIID.NotFound", 50), ("UnauthorizedOperation", 1)]
)
def test_a_permanent_error_is_raised_at_the_deadline_and_any_other_at_once(
    code: str, most: int
) -> None:
    market = Market(lambda _: error(code))

    with pytest.raises(ClientError, match=re.escape(code)):
        purchase_by(market, make_spec(2))
    assert 1 <= len(market.requests) <= most


@pytest.mark.parametrize("code", ["IdempotentInstanceTerminated", "IdempotentParameterMismatch"])
def test_a_token_that_is_spent_is_followed_by_the_next(code: str) -> None:
    market = Market(lambda _: error(code) if len(market.requests) < 3 else "pending")

    purchase_by(market, make_spec(2))

    tokens = [request.pop("ClientToken") for request in market.requests]
    assert len(set(tokens)) == 3
    assert market.requests[0] == market.requests[1] == market.requests[2]


@pytest.mark.parametrize("states", ["terminated", "pending terminated", "terminated running"])
def test_machines_that_have_ended_already_are_bought_anew_under_another_token(states: str) -> None:
    market = Market(lambda _: states if len(market.requests) < 3 else "pending running")

    purchase_by(market, make_spec(2))

    assert len({request["ClientToken"] for request in market.requests}) == 3
    with pytest.raises(CloudError, match="machines that have already ended"):
        purchase_by(Market(lambda _: "shutting-down"), make_spec(2))
