"""Prices of machines, disks, and addresses: from AWS's price list, cached for a week, else from the table.

Every price names its source. Price limits never rely on another region's prices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.clients import DENIED, error_code, translate_boto_error
from infra.errors import UsageError
from infra.files import parse_as, read_text, write_private
from infra.instance_types import INSTANCE_TYPES, TABLE_DATE, TABLE_REGION

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_pricing import PricingClient

    from infra.ec2.instances import Instance

_KEPT_DAYS = 7
# EBS bills by the second of a month of 30 days: https://aws.amazon.com/ebs/pricing/
_HOURS_PER_MONTH = 720
# Included in every gp3 volume: https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
_FREE_IOPS, _FREE_MIBPS = 3000, 125
# The same in all regions, whether or not in use: https://aws.amazon.com/vpc/pricing/ ("Public IPv4 Address")
ADDRESS_USD = 0.005
# China (priced in yuan), GovCloud, and the isolated and sovereign partitions.
_OTHER_PARTITION = re.compile(r"(cn|us-gov|us-iso|eu-iso|eusc)")
# gp3's three prices, by their unit in the price list: our name, and the divisor to our unit.
_GP3 = "gp3"
_GP3_UNITS = {"GB-Mo": ("gib", 1), "IOPS-Mo": ("iops", 1), "GiBps-mo": ("mibps", 1024)}
_GP3_TABLE = {"gib": 0.08, "iops": 0.005, "mibps": 0.04}
# A few prices per type and zone.
_MOST_SPOT_PRICES = 10_000


@dataclass(frozen=True)
class Price:
    """US dollars with their source; ``is_here`` is false for another region's price.

    With ``is_most``, less may be billed.
    """

    usd: float
    source: str
    is_here: bool = True
    is_most: bool = False

    def __str__(self) -> str:
        """Return the amount, such as ``at most $3.20``."""
        return f"{'at most ' if self.is_most else ''}${self.usd:.2f}"


@dataclass(frozen=True)
class _Entry:
    """Prices of a type, or of gp3, as listed on a day."""

    day: date
    usd: Mapping[str, float]


@dataclass(frozen=True)
class Prices:
    """A region's prices: machines per hour on demand; gp3 per month and GiB, IOPS, or MiB/s."""

    region: str = TABLE_REGION
    types: tuple[str, ...] = ()
    """The types whose prices were looked up."""
    machines: Mapping[str, Price] = field(default_factory=dict)
    gp3: Mapping[str, Price] = field(default_factory=dict)
    spot: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Today's spot price per hour, by type and zone."""
    problem: str = ""
    """Why the price list is incomplete or unavailable; "" if it is neither."""

    def disk(self, gib: int, *, iops: int | None = None, mibps: int | None = None) -> Price | None:
        """Return the hourly price of a gp3 disk, if known."""
        counts = {"gib": gib}
        counts |= {"iops": (iops or 0) - _FREE_IOPS, "mibps": (mibps or 0) - _FREE_MIBPS}
        parts = [(self.gp3.get(what), count) for what, count in counts.items() if count > 0]
        known = [(price, count) for price, count in parts if price]
        if len(known) < len(parts) or not known:
            return None
        usd = sum(price.usd * count for price, count in known) / _HOURS_PER_MONTH
        return Price(usd, known[0][0].source, all(price.is_here for price, _ in known))

    def node(
        self, instance_type: str, gib: int, *, public: bool = True, **speed: int | None
    ) -> Price | None:
        """Return the hourly price of a machine with its disk and public address, if known.

        ``speed`` is the disk's: see :meth:`disk`.
        """
        machine, disk = self.machines.get(instance_type), self.disk(gib, **speed)
        if machine is None or disk is None:
            return None
        usd = machine.usd + disk.usd + (ADDRESS_USD if public else 0)
        return Price(usd, machine.source, machine.is_here and disk.is_here)

    def accrued(
        self, machines: Iterable[Instance], now: datetime, gib: int, **speed: int | None
    ) -> Price | None:
        """Return the cost of machines since their purchase, on demand, if every price is known."""
        costs, disk = [], self.disk(gib, **speed)
        for machine in machines:
            public = bool(machine.public_ip)
            each = self.node(machine.instance_type, gib, public=public, **speed)
            if each is None or disk is None:
                return None
            usd = each.usd * machine.hours(now) + disk.usd * machine.stopped_hours(now)
            is_most = machine.was_restarted or bool(machine.spot_request)
            costs.append(replace(each, usd=usd, is_most=is_most))
        sources = dict.fromkeys(cost.source for cost in costs)
        is_here = all(cost.is_here for cost in costs)
        is_most = any(cost.is_most for cost in costs)
        return Price(sum(cost.usd for cost in costs), "; ".join(sources), is_here, is_most)

    def highest(self, types: Sequence[str], gib: int, **options: Any) -> Price | None:
        """Return the hourly price of a node of the most expensive type, if all prices are known."""
        prices = [self.node(name, gib, **options) for name in types if name in self.types]
        known = [price for price in prices if price]
        return max(known, key=lambda p: p.usd) if known and len(known) == len(prices) else None

    def listed(self, types: Sequence[str], options: Mapping[str, Any]) -> Price | None:
        """Return the hourly price of a node with a cluster's options on demand, if all prices are known."""
        disk = {"iops": options["volume_iops"], "mibps": options["volume_throughput"]}
        return self.highest(types, options["volume_gib"], **disk, public=not options["private"])

    def most(self, types: Sequence[str], options: Mapping[str, Any]) -> Price | None:
        """Return the most that a node with a cluster's options can cost per hour, if prices are known."""
        node = self.listed(types, options)
        if node is None or options["market"] == "on-demand" or options["max_price"] is None:
            return node
        machine = max(self.machines[name].usd for name in types if name in self.types)
        spot = node.usd - machine + options["max_price"]
        if options["market"] != "spot":
            spot = max(spot, node.usd)
        return replace(node, usd=spot)

    def market(self, instance_type: str, zone: str, *, spot: bool) -> float | None:
        """Return this region's hourly price of a type in a market, if known."""
        if spot:
            return self.spot.get((instance_type, zone))
        machine = self.machines.get(instance_type)
        return machine.usd if machine and machine.is_here else None


def table_prices(region: str, types: Sequence[str]) -> Prices:
    """Return the shipped table's prices, which apply to one region only."""
    is_here = region == TABLE_REGION
    elsewhere = "" if is_here else f"; unknown in {region}"
    source = f"table of {TABLE_DATE}, {TABLE_REGION}{elsewhere}"

    def price(usd: float) -> Price:
        return Price(usd, source, is_here)

    known = {name: INSTANCE_TYPES[name].table_usd for name in types if name in INSTANCE_TYPES}
    machines = {name: price(usd) for name, usd in known.items() if usd is not None}
    gp3 = {what: price(usd) for what, usd in _GP3_TABLE.items()}
    return Prices(region, tuple(types), machines, gp3)


def describe_prices(
    pricing: PricingClient, region: str, types: Sequence[str], kept: Path, today: date
) -> Prices:
    """Return current prices; ``kept`` is the region's cache file.

    Looks up prices that are over a week old. The first failure stops the look-up; missing prices then
    come from the cache at any age, else from the table.
    """
    before = _read(kept)
    known, unlisted, problem = dict(before), [], ""
    for name in (_GP3, *dict.fromkeys(types)):
        if name in known and 0 <= (today - known[name].day).days < _KEPT_DAYS:
            continue
        try:
            found = _ask(pricing, region, name)
        except (ClientError, BotoCoreError, LookupError, ValueError, UsageError) as error:
            problem = _explain(error)
            break
        if found:
            known[name] = _Entry(today, found)
        else:
            unlisted.append(name)
    if known != before:
        _write(kept, known)
    if unlisted:
        problem = problem or f"the Price List API has no price of {', '.join(unlisted)} in {region}"
    return _merge(table_prices(region, types), known, problem)


def _merge(table: Prices, known: Mapping[str, _Entry], problem: str) -> Prices:
    """Override the table's prices with listed ones."""
    listed = {
        name: {what: Price(usd, f"Price List API, {entry.day}") for what, usd in entry.usd.items()}
        for name, entry in known.items()
    }
    gp3 = {**table.gp3, **listed.pop(_GP3, {})}
    hourly = {name: by["hour"] for name, by in listed.items() if "hour" in by}
    machines = {**table.machines, **hourly}
    return replace(table, machines=machines, gp3=gp3, problem=problem)


def _ask(pricing: PricingClient, region: str, name: str) -> dict[str, float]:
    """Look up a type's price or gp3's prices; return an empty result if the list has none.

    https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_pricing_GetProducts.html
    """
    if _OTHER_PARTITION.match(region):
        raise UsageError(f"the Price List API does not cover {region}")
    wanted = {"volumeApiName": _GP3}
    if name != _GP3:
        wanted = {"instanceType": name, "operatingSystem": "Linux"}
        wanted |= {"preInstalledSw": "NA", "capacitystatus": "Used"}
    filters: Any = [
        {"Type": "TERM_MATCH", "Field": key, "Value": value}
        for key, value in {"regionCode": region, **wanted}.items()
    ]
    answer = pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)
    products = [json.loads(text) for text in answer["PriceList"]]
    meant = [product for product in products if _is_meant(product["product"]["attributes"])]
    return _machine_price(meant) if name != _GP3 else _gp3_prices(meant)


def _is_meant(about: Mapping[str, str]) -> bool:
    """Exclude local zones, on-premises products, and capacity blocks, which are listed at $0."""
    usual = {"locationType": "AWS Region", "marketoption": "OnDemand"}
    return all(about.get(key, value) == value for key, value in usual.items())


def _gp3_prices(products: Sequence[Any]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for unit, usd in (rate for product in products for rate in _rates(product)):
        if unit in _GP3_UNITS:
            what, count = _GP3_UNITS[unit]
            # The included amount may be listed at $0.
            prices[what] = max(prices.get(what, 0.0), usd / count)
    return prices


def _machine_price(products: Sequence[Any]) -> dict[str, float]:
    """Return the price with shared tenancy, else with dedicated, under which bare metal may be listed."""
    by_tenancy = {}
    for product in products:
        hourly = [usd for unit, usd in _rates(product) if unit == "Hrs"]
        by_tenancy[product["product"]["attributes"].get("tenancy")] = max(hourly, default=0.0)
    usd = by_tenancy.get("Shared") or by_tenancy.get("Dedicated")
    return {"hour": usd} if usd else {}


def _rates(product: Any) -> Iterator[tuple[str, float]]:
    """Yield the unit and US dollars of each on-demand rate."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for rate in term["priceDimensions"].values():
            if "USD" in rate["pricePerUnit"]:
                yield rate["unit"], float(rate["pricePerUnit"]["USD"])


def with_spot(prices: Prices, ec2: EC2Client, now: datetime) -> Prices:
    """Add current spot prices, if the account has permission to see them."""
    try:
        # With a StartTime of now, EC2 returns the current price in each zone:
        # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(prices.types),  # type: ignore[arg-type]
            ProductDescriptions=["Linux/UNIX"],
            StartTime=now,
            PaginationConfig={"MaxItems": _MOST_SPOT_PRICES},
        )
        history = [entry for page in pages for entry in page["SpotPriceHistory"]]
    except (ClientError, BotoCoreError) as error:
        return replace(prices, problem=prices.problem or _explain(error))
    # The newest comes first.
    spot = {
        (str(entry["InstanceType"]), entry["AvailabilityZone"]): float(entry["SpotPrice"])
        for entry in reversed(history)
    }
    return replace(prices, spot=spot)


def _explain(error: Exception) -> str:
    if isinstance(error, UsageError):
        return error.message
    if isinstance(error, ClientError) and error_code(error) in DENIED:
        return f"no permission for {error.operation_name}"
    known = translate_boto_error(error)
    return (known.message if known else f"unexpected answer: {error!r}").partition("\n")[0]


def _read(kept: Path) -> dict[str, _Entry]:
    """Return the cached prices by type; empty if the file is missing or damaged."""
    try:
        return parse_as(dict[str, _Entry], read_text(kept, "{}"), str(kept))
    except UsageError:
        return {}


def _write(kept: Path, known: Mapping[str, _Entry]) -> None:
    """Cache the prices; ignore a full or read-only disk."""
    content = {name: asdict(each) for name, each in known.items()}
    with suppress(OSError):
        write_private(kept, json.dumps(content, indent=1, default=str) + "\n")
