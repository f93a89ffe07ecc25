"""A fake of RunInstances with prices, capacity, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError

from infra.ec2 import tags
from infra.ec2.network import Network, TypeSupport
from infra.ec2.purchase import Offer, Purchase, buy, list_offers
from infra.spec import ClusterSpec
from tests.fakes import FakeClock
from tests.infra.plan_inputs import make_image

METAL, SECOND = "r7iz.metal-16xl", "m7i.metal-24xl"
A, B, C = (Network("vpc-1", f"subnet-{letter}", f"us-east-1{letter}") for letter in "abc")
AB = frozenset({"us-east-1a", "us-east-1b"})
SUPPORT = {METAL: TypeSupport(AB), SECOND: TypeSupport(frozenset({"us-east-1b"}))}
NETWORKS = (A, B, C)


def error(code: str, message: str = "no") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "RunInstances")


def make_purchase(spec: ClusterSpec, count: int = 2, **changes: Any) -> Purchase:
    purchase = Purchase(
        spec=spec,
        role="worker",
        count=count,
        image=make_image(),
        group_id="sg-1",
        user_data=lambda offer: f"#cloud-config\n{offer.ena_express}".encode(),
        labels={tags.STACK: "intel"},
        known=frozenset({"i-0"}),
    )
    return replace(purchase, **changes)


def offers_of(spec: ClusterSpec) -> tuple[Offer, ...]:
    return list_offers(spec, SUPPORT, NETWORKS)


@dataclass
class Market:
    """EC2's RunInstances: by the request, an error or the states of the machines in turn."""

    answer: Callable[[dict[str, Any]], Exception | str] = lambda _: "pending"
    requests: list[dict[str, Any]] = field(default_factory=list)

    def run_instances(self, **request: Any) -> Any:
        self.requests.append(request)
        answer = self.answer(request)
        if isinstance(answer, Exception):
            raise answer
        machines = [
            {
                "InstanceId": f"i-{len(self.requests)}",
                "State": {"Name": state},
                "LaunchTime": datetime(2026, 7, 31, tzinfo=timezone.utc),
                "InstanceType": request["InstanceType"],
            }
            for state in itertools.islice(itertools.cycle(answer.split()), request["MinCount"])
        ]
        return {"Instances": machines}

    def tried(self) -> list[tuple[str, str, str, bool]]:
        """Type, subnet, market and group of every request."""
        return [
            (
                request["InstanceType"],
                request["NetworkInterfaces"][0]["SubnetId"],
                "spot" if "InstanceMarketOptions" in request else "on-demand",
                "Placement" in request,
            )
            for request in self.requests
        ]


def purchase_by(market: Market, spec: ClusterSpec, **changes: Any) -> Any:
    client: Any = market
    return buy(client, make_purchase(spec, **changes), offers_of(spec), clock=FakeClock())
