"""What a job's nodes cost: in its record, and in the live line."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from infra.cost.prices import Price, Prices, table_prices
from jobs.cli.places.dry_run import imagine
from jobs.cli.shared.chosen_job import describe_cloud, make_cost
from jobs.places.record import CloudInfo
from tests.aws import fake_aws
from tests.harness.simulated_cloud import SimulatedCloud

METAL = "r7iz.metal-16xl"
TABLE = table_prices("us-east-1", [METAL])
CLUSTER = imagine(METAL, 2, "upstream", datetime(2026, 7, 31, tzinfo=timezone.utc)).cluster


def test_the_record_has_the_price_of_a_node_and_its_source() -> None:
    assert describe_cloud(fake_aws(), TABLE, CLUSTER) == CloudInfo(
        "aws", "us-east-1", True, 6.5472 + 100 * 0.08 / 720 + 0.005, "table of July 2026, us-east-1"
    )
    assert describe_cloud(fake_aws(), Prices(), CLUSTER) == CloudInfo("aws", "us-east-1", True)


def test_the_record_has_no_price_of_another_region() -> None:
    there = replace(fake_aws(), region="eu-west-1")
    elsewhere = table_prices("eu-west-1", [METAL])

    assert elsewhere.machines[METAL] == Price(
        6.5472, "table of July 2026, us-east-1; unknown in eu-west-1", is_here=False
    )
    assert describe_cloud(there, elsewhere, CLUSTER) == CloudInfo("aws", "eu-west-1", True)


def test_the_live_cost_is_that_of_the_whole_cluster(simulated_cloud: SimulatedCloud) -> None:
    cluster = simulated_cloud.prepared(nodes=2)
    ctx = simulated_cloud.seen_as(billed=True).ctx

    usd = make_cost(ctx, TABLE)()

    assert len(cluster.nodes) == 2
    assert usd is not None
    assert usd >= 0
    assert make_cost(ctx, Prices())() is None
    assert make_cost(simulated_cloud.ctx, TABLE)() == 0
