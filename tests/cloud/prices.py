"""The Price List API and spot prices, which moto lacks.

In us-east-1, prices are those of our own table. Other regions' prices are invented but rank as on AWS.
Responses include products that clients must filter out: dedicated
tenancy, and capacity blocks at $0.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from moto.ec2.models.instance_types import INSTANCE_TYPES as EC2_TYPES

from infra.instance_types import INSTANCE_TYPES
from infra.local.api.requests import ApiCall, Reply, error_reply, json_reply
from tests.cloud.faults import ActiveFaults

# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
_ENDPOINTS = ("us-east-1", "eu-central-1", "ap-south-1")
_FACTORS = {"us-east-1": 1.0, "us-east-2": 1.0, "us-west-2": 1.0, "eu-west-1": 1.12}
_FACTORS |= {"eu-central-1": 1.2, "ap-south-1": 1.05, "ap-northeast-1": 1.27, "sa-east-1": 1.6}
_USD_PER_VCPU = 0.05
_SPOT_SHARE = 0.4
# Per month: https://aws.amazon.com/ebs/pricing/
_GP3 = (
    ("Storage", "GB-Mo", 0.08),
    ("System Operation", "IOPS-Mo", 0.005),
    ("Provisioned Throughput", "GiBps-mo", 40.96),
)


def on_demand_usd(faults: ActiveFaults, instance_type: str, region: str) -> float:
    """Return the hourly on-demand price of a type in a region."""
    known = INSTANCE_TYPES.get(instance_type)
    usd = known.table_usd if known else None
    if usd is None:
        usd = EC2_TYPES[instance_type]["VCpuInfo"]["DefaultVCpus"] * _USD_PER_VCPU
    return usd * _FACTORS.get(region, 1.1) * faults.price_factor


def spot_usd(faults: ActiveFaults, instance_type: str, zone: str) -> float:
    """Return a zone's hourly spot price: a fixed one, else a share of the on-demand price."""
    # Later zones are cheaper, so that clients can't rely on the order of zones.
    share = _SPOT_SHARE - 0.01 * (ord(zone[-1]) - ord("a"))
    return faults.spot_usd or on_demand_usd(faults, instance_type, zone[:-1]) * share


def spot_history(faults: ActiveFaults, region: str, types: list[str]) -> list[dict[str, Any]]:
    """Return the current spot price of each type and zone."""
    offered = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    history = []
    for place in sorted(offered, key=lambda offering: str(offering["Location"])):
        name, zone = place["InstanceType"], place["Location"]
        if name in types:
            usd = f"{spot_usd(faults, name, zone):.6f}"
            history.append({"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": usd})
    return history


def answer_get_products(call: ApiCall, faults: ActiveFaults) -> Reply:
    """Answer GetProducts with the products that match every filter."""
    if call.region not in _ENDPOINTS:
        return error_reply(call, 400, "NotFoundException", f"no endpoint in {call.region}")
    request = json.loads(call.body)
    wanted = {each["Field"]: each["Value"] for each in request.get("Filters", [])}
    region, name = wanted.get("regionCode", ""), wanted.get("instanceType", "")
    products = [*_machines(faults, name, region), *_disks(faults, region)]
    found = [
        json.dumps(product)
        for product in products
        if wanted.items() <= {**_attributes(product), "regionCode": region}.items()
    ]
    return json_reply({"FormatVersion": "aws_v1", "PriceList": found})


def _attributes(product: dict[str, Any]) -> dict[str, str]:
    described = product["product"]
    return {"productFamily": described["productFamily"], **described["attributes"]}


def _machines(faults: ActiveFaults, name: str, region: str) -> Iterator[dict[str, Any]]:
    offered = INSTANCE_TYPE_OFFERINGS["region"].get(region, [])
    unlisted = any(fnmatch.fnmatchcase(name, pattern) for pattern in faults.unlisted)
    if unlisted or name not in {offering["InstanceType"] for offering in offered}:
        return
    usd = on_demand_usd(faults, name, region)
    kinds = (("CapacityBlock", "Shared", 0.0), ("OnDemand", "Dedicated", usd * 1.06))
    metal = " (bare metal)" if EC2_TYPES[name]["BareMetal"] else ""
    for option, tenancy, price in (*kinds, ("OnDemand", "Shared", usd)):
        attributes = {
            "instanceType": name,
            "operatingSystem": "Linux",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": option,
            "locationType": "AWS Region",
            "tenancy": tenancy,
        }
        yield _product(f"Compute Instance{metal}", attributes, "Hrs", price)


def _disks(faults: ActiveFaults, region: str) -> Iterator[dict[str, Any]]:
    factor = _FACTORS.get(region, 1.1) * faults.price_factor
    for family, unit, usd in _GP3:
        yield _product(family, {"volumeApiName": "gp3"}, unit, usd * factor)


def _product(family: str, attributes: dict[str, str], unit: str, usd: float) -> dict[str, Any]:
    """Return an entry of the price list, in AWS's nested format."""
    dimension = {"unit": unit, "pricePerUnit": {"USD": f"{usd:.10f}"}}
    return {
        "product": {"productFamily": family, "attributes": attributes},
        "terms": {"OnDemand": {"SKU.TERM": {"priceDimensions": {"SKU.TERM.RATE": dimension}}}},
    }
