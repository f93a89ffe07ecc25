"""What a job's nodes cost: in its record, and in the live line."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.local_files import utc_now
from infra.cost.prices import Price, Prices, table_prices
from jobs.cli.places.dry_run import imagine
from jobs.cli.shared.chosen_job import describe_cloud, make_cost
from jobs.places.record import CloudInfo
from jobs.report.receipt import add_receipt
from provision.host import Result
from tests.aws import fake_aws
from tests.harness.command_line import open_command_line, replace_everywhere
from tests.harness.simulated_cloud import SimulatedCloud
from tests.infra.local.fakes import Endpoint
from tests.jobs.cli.test_when_done import stage
from tests.jobs.context import listed
from tests.jobs.report.sample_runs import make_results

METAL = "r7iz.metal-16xl"
TABLE = table_prices("us-east-1", [METAL])
CLUSTER = imagine(METAL, 2, "upstream", datetime(2026, 7, 31, tzinfo=timezone.utc)).cluster


def test_the_record_has_the_price_of_a_node_and_its_source() -> None:
    assert describe_cloud(fake_aws(), TABLE, CLUSTER, Prices) == CloudInfo(
        "aws", "us-east-1", True, 6.5472 + 100 * 0.08 / 720 + 0.005, "table of July 2026, us-east-1"
    )
    assert describe_cloud(fake_aws(), Prices(), CLUSTER, Prices) == CloudInfo(
        "aws", "us-east-1", True
    )


def test_the_record_has_no_price_of_another_region() -> None:
    there = replace(fake_aws(), region="eu-west-1")
    elsewhere = table_prices("eu-west-1", [METAL])

    assert elsewhere.machines[METAL] == Price(
        6.5472, "table of July 2026, us-east-1; unknown in eu-west-1", is_here=False
    )
    assert describe_cloud(there, elsewhere, CLUSTER, Prices) == CloudInfo("aws", "eu-west-1", True)


def test_the_live_cost_is_that_of_the_whole_cluster(simulated_cloud: SimulatedCloud) -> None:
    cluster = simulated_cloud.prepared(nodes=2)
    ctx = simulated_cloud.seen_as(billed=True).ctx

    usd = make_cost(ctx, TABLE)()

    assert len(cluster.nodes) == 2
    assert usd is not None
    assert usd >= 0
    assert make_cost(ctx, Prices())() is None
    assert make_cost(simulated_cloud.ctx, TABLE)() == 0


def test_nodes_on_spot_cost_todays_price_of_their_zone_or_at_most_that_on_demand() -> None:
    head, worker = CLUSTER.nodes
    spot = replace(head, instance=replace(head.instance, spot_request="sir-1", zone="us-east-1a"))
    mixed, whole = replace(CLUSTER, nodes=(spot, worker)), replace(CLUSTER, nodes=(spot, spot))
    known = replace(TABLE, spot={(METAL, "us-east-1a"): 2.5472})

    half, full, unknown = (
        describe_cloud(fake_aws(), TABLE, each, lambda prices=prices: prices)  # type: ignore[misc]
        for each, prices in ((mixed, known), (whole, known), (whole, TABLE))
    )

    listed_usd = 6.5472 + 100 * 0.08 / 720 + 0.005
    found = [half, full, unknown]
    assert [each.market for each in found] == ["50% on spot", "on spot", "at most, on spot"]
    assert [each.usd_per_hour for each in found] == pytest.approx(
        [listed_usd - n for n in (2, 4, 0)]
    )


@pytest.mark.parametrize("market", ["on-demand", "spot"])
def test_the_receipts_of_a_clusters_jobs_are_the_meters_bill(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, market: str
) -> None:
    """EC2 does not say when it begins to bill: the receipts begin half a minute earlier, with the launch."""
    monkeypatch.chdir(tmp_path)
    with open_command_line(endpoint, tmp_path, monkeypatch) as line:
        clock = line.cloud.clock

        def now() -> datetime:
            return datetime.fromtimestamp(clock.now, timezone.utc)

        replace_everywhere(monkeypatch, utc_now, now)
        monkeypatch.setattr("jobs.cli.run.datetime", SimpleNamespace(now=lambda _: now()))
        line.cloud.faults('profile = "metal"\nboot_s = 20\n')
        line.must("up", "--nodes=2", "--yes", f"--market={market}")
        clock.sleep(600)
        job, ends, spent = stage(line, monkeypatch), list[dict[str, Any]](), 0.0
        job.files["output/results.json"] = json.dumps(make_results()).encode()

        def follow(_: object) -> Result:
            clock.sleep(45)
            first = now()
            clock.sleep(300)
            began = now()
            clock.sleep(3600)
            times = {"first": first, "began": began, "ended": now()}
            ends.append({k: v.isoformat() for k, v in times.items()} | {"state": "succeeded"})
            return Result(0, "", "")

        def list_ended(_: object) -> Result:
            return Result(
                0, "".join(listed(f"squad-{n}", end=end) for n, end in enumerate(ends)), ""
            )

        job.followed = follow  # type: ignore[method-assign]
        for pattern, answer in {
            "# following a job": follow,
            r"cat \S+/end.json": lambda _: Result(0, json.dumps(ends[-1]), ""),
            "# listing the jobs": list_ended,
        }.items():
            line.machines.staged.insert(0, ("node0", pattern, answer))
        for number, idle in enumerate((0, 3600)):
            clock.sleep(idle)
            line.must("run", "--results", f"results/run-{number}", "--", "hostname")
            receipt = add_receipt(Path(f"results/run-{number}"))["receipt"]
            assert sum(part["usd"] for part in receipt["parts"].values()) == pytest.approx(
                receipt["usd"]
            )
            waited = receipt["parts"]["idle before it" if idle else "boot and installation"]
            assert waited["seconds"] == pytest.approx(idle or 630, abs=30)
            spent += receipt["usd"]
            meter = line.cloud.fake.backend.lifecycle.meter
            assert spent == pytest.approx(sum(meter.bill(clock.now).values()), rel=0.01)
            assert ("on spot" in receipt["price_source"]) is (market == "spot")
        costs = json.loads(line.must("jobs", "--cost", "--json").out)
        assert [each["job"] for each in costs["jobs"]] == ["run-0", "run-1"]
        for group in ("month", "owner", "cluster"):
            (one,) = costs[group].values()
            assert one == {"jobs": 2, "node_hours": one["node_hours"], "usd": pytest.approx(spent)}
        table = line.must("jobs", "--cost").out
        assert f"${spent:,.2f}" in table
        assert "owner " in table
        assert line.run("jobs", "--cost", "--all").code == 2
