"""What the product claims about AWS, compared with what AWS says: instance types and prices.

Each function yields what is wrong, or raises botocore's error if the account may not look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from infra.instance_types import INSTANCE_TYPES
from tests.aws_check.sides import Side

_PRICE_TOLERANCE = 0.005


@dataclass(frozen=True)
class Fact:
    """A claim of the product."""

    name: str
    why: str
    look: Callable[[Side], Iterator[str]]


# The attribute in the product's table, and where DescribeInstanceTypes has it.
_OF_TYPE: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("vcpus", lambda found: found["VCpuInfo"]["DefaultVCpus"]),
    ("cores", lambda found: found["VCpuInfo"]["DefaultCores"]),
    ("memory_gib", lambda found: found["MemoryInfo"]["SizeInMiB"] / 1024),
    ("gbit", lambda found: found["NetworkInfo"]["NetworkCards"][0]["BaselineBandwidthInGbps"]),
    ("ghz", lambda found: found["ProcessorInfo"]["SustainedClockSpeedInGhz"]),
    ("is_metal", lambda found: found["BareMetal"]),
)


def _types(side: Side) -> Iterator[str]:
    for name, found in sorted(_describe_types(side).items()):
        for attribute, look in _OF_TYPE:
            claimed = getattr(INSTANCE_TYPES[name], attribute, None)
            if claimed is not None and claimed != look(found):
                yield f"{name}: {attribute} is {look(found)}, not {claimed}"


def _describe_types(side: Side) -> dict[str, Any]:
    pages = side.clients.ec2.get_paginator("describe_instance_types").paginate(
        Filters=[{"Name": "instance-type", "Values": sorted(INSTANCE_TYPES)}]
    )
    return {found["InstanceType"]: found for page in pages for found in page["InstanceTypes"]}


def _prices(side: Side) -> Iterator[str]:
    """https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/price-changes.html"""
    for name, claimed in INSTANCE_TYPES.items():
        usd = claimed.table_usd
        found = _price_of(side, name)
        if usd is None or found is None:
            continue
        if abs(found - usd) > usd * _PRICE_TOLERANCE:
            yield f"{name}: ${found:g} an hour, not ${usd:g}"


def _price_of(side: Side, name: str) -> float | None:
    fields = {"instanceType": name, "regionCode": "us-east-1", "operatingSystem": "Linux"}
    fields |= {"tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"}
    filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in fields.items()]
    products = side.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)
    for text in products["PriceList"]:
        terms = json.loads(text)["terms"].get("OnDemand", {})
        for dimension in (d for term in terms.values() for d in term["priceDimensions"].values()):
            if float(usd := dimension["pricePerUnit"].get("USD", 0)):
                return float(usd)
    return None


FACTS = (
    Fact("instance types", "thread counts and checks of nodes follow from them", _types),
    Fact("prices in us-east-1", "`up --dry-run` shows them, and its limit", _prices),
)
