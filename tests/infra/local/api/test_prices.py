"""The price list and the spot prices of the embedded cloud."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from infra.aws.clients import error_code
from tests.infra.local.fakes import CREDENTIALS, FakeCloud, refusal

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


def test_prices_differ_by_region_and_follow_the_faults(fake_cloud: FakeCloud) -> None:
    def price(region: str) -> float:
        return max(
            usd(p) for p in ask(fake_cloud, instanceType=TYPE, regionCode=region, tenancy="Shared")
        )

    regions = ("us-east-1", "eu-west-1", "eu-central-1", "ap-northeast-1")
    assert len({price(region) for region in regions}) == 4
    fake_cloud.faults("[pricing]\nfactor = 1.1\n")
    assert price("us-east-1") == pytest.approx(6.5472 * 1.1)
    fake_cloud.faults('[pricing]\nunlisted = ["r7iz.*"]\n')
    assert ask(fake_cloud, instanceType=TYPE, regionCode="us-east-1") == []


def test_it_is_served_in_its_own_regions_only(fake_cloud: FakeCloud) -> None:
    far = boto3.client(
        "pricing",
        region_name="us-west-2",
        endpoint_url=fake_cloud.endpoint.url,
        aws_access_key_id=CREDENTIALS[0],
        aws_secret_access_key=CREDENTIALS[1],
    )
    with pytest.raises(ClientError) as caught:
        far.get_products(ServiceCode="AmazonEC2", Filters=[])
    assert error_code(caught.value) == "NotFoundException"


def spot(cloud: FakeCloud) -> dict[str, float]:
    history = cloud.ec2.describe_spot_price_history(
        InstanceTypes=[TYPE], ProductDescriptions=["Linux/UNIX"]
    )
    return {e["AvailabilityZone"]: float(e["SpotPrice"]) for e in history["SpotPriceHistory"]}


def test_spot_prices_differ_by_zone_and_refuse_what_is_below_them(fake_cloud: FakeCloud) -> None:
    prices = spot(fake_cloud)
    assert len(set(prices.values())) == len(prices) > 1
    assert all(0 < price < 6.5472 for price in prices.values())

    subnets = fake_cloud.ec2.describe_subnets()["Subnets"]
    zone, cheapest = min(prices.items(), key=lambda item: item[1])
    subnet = next(s["SubnetId"] for s in subnets if s["AvailabilityZone"] == zone)

    def request(price: float) -> dict[str, Any]:
        options = {"MarketType": "spot", "SpotOptions": {"MaxPrice": f"{price:.6f}"}}
        return {"SubnetId": subnet, "InstanceMarketOptions": options}

    too_low = {
        "ImageId": "ami-00000000000000000",
        "InstanceType": TYPE,
        "MinCount": 1,
        "MaxCount": 1,
    }
    too_low["ImageId"] = fake_cloud.ec2.describe_images()["Images"][0]["ImageId"]
    assert refusal(fake_cloud.ec2.run_instances, **too_low, **request(cheapest - 0.01)) == (
        "SpotMaxPriceTooLow"
    )
    assert fake_cloud.run(**request(cheapest))

    fake_cloud.faults("[spot]\nusd_per_hour = 2.5\n")
    assert set(spot(fake_cloud).values()) == {2.5}
