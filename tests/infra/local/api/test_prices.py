"""The price list and the spot prices of the embedded cloud."""

from __future__ import annotations

import json
from typing import Any

from tests.infra.local.fakes import FakeCloud, refusal

TYPE = "r7iz.metal-16xl"


def ask(cloud: FakeCloud, **wanted: str) -> list[Any]:
    filters: Any = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()]
    answer = cloud.clients.pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)
    return [json.loads(text) for text in answer["PriceList"]]


def usd(product: Any) -> float:
    (term,) = product["terms"]["OnDemand"].values()
    (rate,) = term["priceDimensions"].values()
    return float(rate["pricePerUnit"]["USD"])


def test_only_products_that_match_every_filter_are_listed(fake_cloud: FakeCloud) -> None:
    found = ask(fake_cloud, instanceType=TYPE, regionCode="us-east-1")
    kinds = {(p["product"]["attributes"]["tenancy"], round(usd(p), 2)) for p in found}

    # A capacity block at $0 and dedicated tenancy stand beside the price that is meant.
    assert kinds == {("Shared", 0.0), ("Dedicated", 6.94), ("Shared", 6.55)}
    assert ask(fake_cloud, instanceType=TYPE, regionCode="us-east-1", tenancy="Host") == []
    assert ask(fake_cloud, instanceType="no.such", regionCode="us-east-1") == []
    disks = ask(fake_cloud, volumeApiName="gp3", regionCode="eu-west-1")
    assert {p["product"]["productFamily"] for p in disks} == {
        "Storage",
        "System Operation",
        "Provisioned Throughput",
    }


def test_it_is_served_in_its_own_regions_only(fake_cloud: FakeCloud) -> None:
    far = fake_cloud.endpoint.client("pricing", region="us-west-2")
    assert refusal(far.get_products, ServiceCode="AmazonEC2", Filters=[]) == "NotFoundException"
