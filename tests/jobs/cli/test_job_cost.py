"""What a job's nodes cost: in its record, and in the live line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.local_files import utc_now
from infra.aws.cloud import Cloud
from infra.cost.prices import Price, Prices, table_prices
from jobs.cli.places.dry_run import imagine
from jobs.cli.shared.chosen_job import describe_cloud, make_cost, open_overview
from jobs.places.record import CloudInfo, read_job_id
from jobs.report.receipt import read_receipt
from provision.host import Result
from tests.harness.command_line import CommandLine, open_command_line, replace_everywhere
from tests.harness.simulated_cloud import SimulatedCloud
from tests.infra.local.fakes import Endpoint
from tests.jobs.cli.test_when_done import StagedJob, stage
from tests.jobs.context import listed
from tests.jobs.report.sample_runs import make_results

AWS = Cloud("aws", "us-east-1", lambda: "203.0.113.7/32", billed=True, has_amx=True)
METAL = "r7iz.metal-16xl"
TABLE = table_prices("us-east-1", [METAL])
CLUSTER = imagine(METAL, 2, "upstream", datetime(2026, 7, 31, tzinfo=timezone.utc)).cluster


LISTED_USD = 6.5472 + (100 * 0.08 + 625 * 0.04) / 720 + 0.005


def test_the_record_has_the_price_of_a_node_and_its_source() -> None:
    priced = CloudInfo("aws", "us-east-1", True, LISTED_USD, "table of July 2026, us-east-1")
    assert describe_cloud(AWS, TABLE, CLUSTER, Prices) == priced
    assert describe_cloud(AWS, Prices(), CLUSTER, Prices) == CloudInfo("aws", "us-east-1", True)
    there = replace(AWS, region="eu-west-1")
    elsewhere = table_prices("eu-west-1", [METAL])
    unknown = "table of July 2026, us-east-1; unknown in eu-west-1"
    assert elsewhere.machines[METAL] == Price(6.5472, unknown, is_here=False)
    assert describe_cloud(there, elsewhere, CLUSTER, Prices) == CloudInfo("aws", "eu-west-1", True)


def test_the_live_cost_is_that_of_the_whole_cluster(simulated_cloud: SimulatedCloud) -> None:
    cluster = simulated_cloud.prepared(nodes=2)
    ctx = simulated_cloud.seen_as(billed=True).ctx
    cost, free = make_cost(ctx, TABLE)(), make_cost(simulated_cloud.ctx, TABLE)()
    assert cost
    assert free
    assert cost.usd >= free.usd == 0
    assert make_cost(ctx, Prices())() is None
    lost = cluster.nodes[1].instance.id
    simulated_cloud.end(lost)
    assert [each.id for each in open_overview(ctx, TABLE).terminated] == [lost]


def test_nodes_on_spot_cost_todays_price_of_their_zone_or_at_most_that_on_demand() -> None:
    head, worker = CLUSTER.nodes
    spot = replace(head, instance=replace(head.instance, spot_request="sir-1", zone="us-east-1a"))
    known = replace(TABLE, spot={(METAL, "us-east-1a"): 2.5472})
    for nodes, prices, market, less in (
        ((spot, worker), known, "50% on spot", 2),
        ((spot, spot), known, "on spot", 4),
        ((spot, spot), TABLE, "at most, on spot", 0),
    ):
        found = describe_cloud(AWS, TABLE, replace(CLUSTER, nodes=nodes), lambda: prices)  # noqa: B023
        assert found.market == market
        assert found.usd_per_hour == pytest.approx(LISTED_USD - less)


@dataclass
class MeteredJobs:
    """Jobs on simulated EC2, whose receipts are compared with the bill that it keeps of its machines."""

    line: CommandLine
    job: StagedJob
    monkeypatch: pytest.MonkeyPatch
    end: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The ended jobs by name."""
    state: str = "succeeded"
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.job.followed = self.follow  # type: ignore[method-assign]
        for pattern, answer in {
            "# following a job": self.follow,
            r"cat \S+/end.json": lambda _: Result(0, json.dumps(self.end), ""),
            "# listing the jobs": self.list_ended,
        }.items():
            self.line.machines.staged.insert(0, ("node0", pattern, answer))

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.line.cloud.clock.now, timezone.utc)

    def follow(self, _: object) -> Result:
        self.line.cloud.clock.sleep(45)
        first = self.now()
        self.line.cloud.clock.sleep(300)
        began = self.now()
        self.line.cloud.clock.sleep(3600)
        times = {"first": first, "began": began, "ended": self.now()}
        nodes = [f"node{n}" for n in range(len(self.line.ids()))]
        self.end = {"state": self.state, "nodes": nodes}
        self.end |= {name: at.isoformat() for name, at in times.items()}
        return Result(0, "", "")

    def list_ended(self, _: object) -> Result:
        rows = (listed(name, "step-000040", end=end) for name, end in self.ends.items())
        return Result(0, "".join(rows), "")

    def run(self, folder: str, *words: str) -> dict[str, float]:
        """Run a job; return the seconds of its receipt's parts."""
        results, before = Path("results", folder), 0.0
        if earlier := read_receipt(results):
            before = earlier[1].usd(earlier[1].total_s) or 0.0
        argv = words or ("run", "hostname")
        at = argv.index("hostname") if "hostname" in argv else len(argv)
        done = self.line.run(*argv[:at], "--results", str(results), *argv[at:])
        assert done.code == (0 if self.state == "succeeded" else 1), done.err
        self.ends[read_job_id(results)] = self.end
        known = read_receipt(results)
        assert known
        receipt = known[1].as_dict()
        assert sum(part["usd"] for part in receipt["parts"].values()) == pytest.approx(
            receipt["usd"]
        )
        self.spent += receipt["usd"] - before
        meter = self.line.cloud.fake.backend.lifecycle.meter
        bill = sum(meter.bill(self.line.cloud.clock.now).values())
        assert self.spent == pytest.approx(bill, rel=0.01)
        self.price_source = receipt["price_source"]
        return {name: part["seconds"] for name, part in receipt["parts"].items()}


@pytest.fixture
def jobs(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MeteredJobs]:
    monkeypatch.chdir(tmp_path)
    with open_command_line(endpoint, tmp_path, monkeypatch) as line:
        found = MeteredJobs(line, stage(line, monkeypatch), monkeypatch)
        replace_everywhere(monkeypatch, utc_now, found.now)
        monkeypatch.setattr("jobs.cli.run.datetime", SimpleNamespace(now=lambda _: found.now()))
        monkeypatch.setattr("jobs.cli.train.datetime", SimpleNamespace(now=lambda _: found.now()))
        found.job.files["output/results.json"] = json.dumps(make_results()).encode()
        yield found


@pytest.mark.parametrize("market", ["on-demand", "spot"])
def test_the_receipts_of_a_clusters_jobs_are_the_meters_bill(
    jobs: MeteredJobs, market: str
) -> None:
    """EC2 does not say when it begins to bill: the receipts begin half a minute earlier, with the launch."""
    line, clock = jobs.line, jobs.line.cloud.clock
    line.cloud.faults('profile = "metal"\nboot_s = 20\n')
    line.must("up", "--nodes=2", "--yes", f"--market={market}")
    clock.sleep(600)
    for number, idle in enumerate((0, 3600)):
        clock.sleep(idle)
        parts = jobs.run(f"run-{number}")
        waited = parts["idle before it" if idle else "boot and installation"]
        assert waited == pytest.approx(idle or 630, abs=30)
        assert ("on spot" in jobs.price_source) is (market == "spot")
    costs = json.loads(line.must("jobs", "--cost", "--json").out)
    assert [each["job"] for each in costs["jobs"]] == [
        read_job_id(Path("results", name)) for name in ("run-0", "run-1")
    ]
    for group in ("month", "owner", "cluster"):
        # The jobs of a test late on a month's last day have two months.
        found = costs[group].values()
        total = {key: sum(each[key] for each in found) for key in ("jobs", "usd", "unpriced")}
        assert total == {"jobs": 2, "usd": pytest.approx(jobs.spent), "unpriced": 0}
    table = line.must("jobs", "--cost").out
    assert f"${jobs.spent:,.2f}" in table
    assert "owner " in table
    assert line.run("jobs", "--cost", "--all").code == 2


def test_receipts_have_what_failed_and_replaced_nodes_cost(jobs: MeteredJobs) -> None:
    line, clock = jobs.line, jobs.line.cloud.clock
    line.cloud.faults('profile = "metal"\nboot_s = 20\n[[machine]]\nn = 0\nfate = "no-ssh"\n')
    line.must("up", "--nodes=3", "--yes")
    first = jobs.run("run-0")
    clock.sleep(7200)
    line.cloud.fake.backend.lifecycle.impaired.add(line.ids()[-1])
    line.must("repair", "--yes")
    clock.sleep(3600)
    second = jobs.run("run-1")

    gone = "failed or replaced nodes"
    assert first[gone] == pytest.approx(2400 / 3, rel=0.02)
    assert second[gone] == pytest.approx(7200 / 3, rel=0.02)
    clock.sleep(600)
    assert gone not in jobs.run("run-2")


def test_a_resumed_job_has_one_receipt_for_all_of_its_runs(jobs: MeteredJobs) -> None:
    line, clock = jobs.line, jobs.line.cloud.clock
    record = Path("record-on-the-head.json")
    line.stage("node0", r"cat \S+/job.json", lambda _: Result(0, record.read_text(), ""))

    def fetch(_: object) -> Result:
        for path in line.cloud.machines.root.glob("*/job.json.*"):
            path.rename(record)
            jobs.job.files["job.json"] = record.read_bytes()
        return Result(0, "at 5\n", "")

    line.machines.staged.insert(0, ("node0", "# collecting the results", fetch))
    for nothing in ("tuned.json", "# reading how many steps"):
        line.stage("node0", nothing, Result(0, "", ""))
    line.must("up", "--nodes=2", "--yes")
    train = ("train", "squad", "--demo", "--backend=gloo")
    jobs.state = "failed"
    found = [jobs.run("squad", *train)]
    kept = json.loads(Path("results/squad/job/job.json").read_text())
    record.write_text(json.dumps({**kept, "state": ""}))
    for idle in (1800, 7200):
        clock.sleep(idle)
        found.append(jobs.run("squad", *train[:2], "--resume"))
    waited = [parts.get("idle before it", 0.0) for parts in found]
    assert waited == pytest.approx([0, 1800, 7200], abs=30)
    earlier = [parts["earlier attempts and pauses"] for parts in found]
    boot = found[0]["boot and installation"]
    assert earlier == pytest.approx([300, boot + 4245, boot + 1800 + 8190], abs=30)
