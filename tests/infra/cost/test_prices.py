"""Prices: from the price list, kept for a week, else from the table; what jobs cost at them."""

from __future__ import annotations

import json
import socket
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infra.aws.clients import PRICING_TIMEOUTS, connect
from infra.cost.prices import Prices, describe_prices, table_prices, with_spot
from infra.cost.spending import Spending
from infra.instance_types import INSTANCE_TYPES, find_machine
from tests.harness.cloud import make_cloud
from tests.infra.local.fakes import FakeCloud

TODAY = date(2026, 11, 22)
METAL, OTHER = "r7iz.metal-16xl", "c8in.8xlarge"
DENIED = (
    '[[error]]\naction = "GetProducts"\ncode = "AccessDeniedException"\nstatus = 400\ntimes = 99\n'
)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "prices-here.json"


def ask(cloud: FakeCloud, kept: Path, region: str = "us-east-1", **options: Any) -> Prices:
    types = options.get("types", (METAL, OTHER))
    return describe_prices(cloud.clients.pricing, region, types, kept, options.get("today", TODAY))


def test_a_type_that_the_table_lacks_has_a_price_and_is_described(
    ec2_cloud: FakeCloud, kept: Path
) -> None:
    assert OTHER not in INSTANCE_TYPES
    assert ask(ec2_cloud, kept).machines[OTHER].usd == pytest.approx(32 * 0.05)
    machine = find_machine(ec2_cloud.ec2, OTHER)
    assert machine is not None
    assert (machine.cores, machine.vcpus, machine.memory_gib) == (16, 32, 64)
    assert (machine.sockets, machine.amx, machine.table_usd) == (None, None, None)
    assert find_machine(ec2_cloud.ec2, "c7i.9xlarge") is None
    assert find_machine(ec2_cloud.ec2, METAL) is INSTANCE_TYPES[METAL]


def test_disks_and_addresses_are_counted_in(ec2_cloud: FakeCloud, kept: Path) -> None:
    prices = ask(ec2_cloud, kept, "eu-west-1")

    disk = prices.disk(720, iops=3000 + 7200, mibps=125 + 720)
    assert disk is not None
    # 0.08 per GiB, 0.005 per further IOPS, 0.04 per further MiB/s, and month.
    assert disk.usd == pytest.approx((0.08 + 0.05 + 0.04) * 1.12)
    with_address, without = prices.node(METAL, 100), prices.node(METAL, 100, public=False)
    assert with_address is not None
    assert without is not None
    assert with_address.usd - without.usd == pytest.approx(0.005)


def test_prices_are_kept_for_a_week_and_then_replaced(ec2_cloud: FakeCloud, kept: Path) -> None:
    first = ask(ec2_cloud, kept)
    ec2_cloud.faults(DENIED)

    assert ask(ec2_cloud, kept, today=TODAY + timedelta(days=6)) == first
    # Older ones are still better than the table, and say their age.
    old = ask(ec2_cloud, kept, today=TODAY + timedelta(days=30))
    assert old.machines == first.machines
    assert old.problem == "no permission for GetProducts"
    ec2_cloud.faults("[pricing]\nfactor = 2\n")
    new = ask(ec2_cloud, kept, today=TODAY + timedelta(days=7))
    assert new.machines[METAL].usd == pytest.approx(2 * 6.5472)


@pytest.mark.parametrize("text", ["{", '{"gp3": {"date": "x", "usd": {}}}'])
def test_a_damaged_file_is_no_obstacle(ec2_cloud: FakeCloud, kept: Path, text: str) -> None:
    kept.write_text(text)

    assert ask(ec2_cloud, kept).machines[METAL].source == "Price List API, 2026-11-22"
    assert METAL in json.loads(kept.read_text())


def test_a_type_that_is_not_listed_is_named(ec2_cloud: FakeCloud, kept: Path) -> None:
    ec2_cloud.faults('[pricing]\nunlisted = ["c8in.*"]\n')

    prices = ask(ec2_cloud, kept)

    assert prices.problem == "the Price List API has no price of c8in.8xlarge in us-east-1"
    assert prices.machines[METAL].source == "Price List API, 2026-11-22"
    assert prices.highest((METAL, OTHER), 100) is None
    assert prices.highest((METAL,), 100) is not None


def test_other_partitions_are_not_asked_about(ec2_cloud: FakeCloud, kept: Path) -> None:
    for region in ("cn-north-1", "us-gov-west-1", "eusc-de-east-1"):
        prices = ask(ec2_cloud, kept, region)
        assert prices.problem == f"the Price List API does not cover {region}"
        assert not prices.machines[METAL].is_here


def test_an_answer_that_can_t_be_read_is_no_failure(kept: Path) -> None:
    odd = Mock(get_products=Mock(return_value={"PriceList": ['{"product": 1}', "no JSON"]}))
    prices = describe_prices(odd, "us-east-1", (METAL,), kept, TODAY)
    assert prices.problem.startswith("unexpected answer: ")
    assert prices.machines[METAL].usd == 6.5472


def test_bare_metal_that_is_listed_as_dedicated_has_that_price(kept: Path) -> None:
    rate = {"unit": "Hrs", "pricePerUnit": {"USD": "7.0000000000"}}
    product = {
        "product": {"attributes": {"tenancy": "Dedicated"}},
        "terms": {"OnDemand": {"t": {"priceDimensions": {"r": rate}}}},
    }
    listed = Mock(get_products=Mock(return_value={"PriceList": [json.dumps(product)]}))
    assert describe_prices(listed, "us-east-1", (METAL,), kept, TODAY).machines[METAL].usd == 7.0


def test_a_price_list_that_never_answers_costs_seconds(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(PRICING_TIMEOUTS.values()) <= 10
    monkeypatch.setattr("infra.aws.clients.PRICING_TIMEOUTS", dict.fromkeys(PRICING_TIMEOUTS, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(make_cloud(f"http://127.0.0.1:{silent.getsockname()[1]}")).pricing
        config: Any = client.meta.config
        assert (config.connect_timeout, config.read_timeout) == (0.2, 0.2)
        assert config.retries["total_max_attempts"] == 1

        prices = describe_prices(client, "us-east-1", (METAL, OTHER), kept, TODAY)

    assert prices.problem.startswith("cannot reach AWS: ")
    assert prices.machines[METAL].is_here


def test_spot_prices_are_those_of_each_zone(ec2_cloud: FakeCloud) -> None:
    now = datetime(2026, 11, 22, tzinfo=timezone.utc)
    table = table_prices("us-east-1", (METAL,))
    ec2_cloud.faults("page_size = 1\n")

    prices = with_spot(table, ec2_cloud.ec2, now)

    assert prices.market(METAL, "us-east-1a", spot=True) == pytest.approx(0.4 * 6.5472, abs=1e-5)
    assert prices.market(METAL, "us-east-1b", spot=True) == pytest.approx(0.39 * 6.5472, abs=1e-5)
    assert prices.market(METAL, "us-east-1a", spot=False) == 6.5472

    ec2_cloud.faults(
        '[[error]]\naction = "DescribeSpotPriceHistory"\ncode = "UnauthorizedOperation"\n'
    )
    denied = with_spot(table, ec2_cloud.ec2, now)
    assert denied.problem == "no permission for DescribeSpotPriceHistory"
    assert denied.spot == {}


@pytest.mark.parametrize(
    ("spending", "text"),
    [
        (Spending(600, None, 6.0, budget=12.0), "$1.00 spent, $11.00 left"),
        (Spending(600, None, 6.0, max_time_s=3600), "$1.00 spent, $5.00 left"),
        (Spending(9000, 0, 6.0, budget=12.0), "$15.00 spent, $15.00 expected, $0.00 left"),
        (Spending(600, 1200, None, budget=12.0), ""),
        # After 100 s of other nodes.
        (Spending(600, 1200, 6.0, 12.0, 0.0, 100, 2.0), "$3.00 spent, $5.00 expected, $9.00 left"),
        (Spending(600, None, 6.0, 0.0, 3700, 100, 2.0), "$3.00 spent, $5.00 left"),
    ],
)
def test_what_a_job_has_cost_will_cost_and_may_cost(spending: Spending, text: str) -> None:
    assert spending.describe() == text
