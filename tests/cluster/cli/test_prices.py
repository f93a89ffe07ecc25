"""Money as commands show it, and types that the table does not know, on a cloud called AWS."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cluster.local_files import ClusterFiles
from infra.ec2.instances import WORKER
from infra.ec2.inventory import describe_inventory
from tests.cluster.cli.test_iam_policy import subnet_of
from tests.harness.command_line import CommandLine

# With the grace period and the shutdown.
_HOURS = 8.5 + 1 / 12

DENIED = (
    '[[error]]\naction = "GetProducts"\ncode = "AccessDeniedException"\nstatus = 400\ntimes = 99\n'
)


def plan(line: CommandLine, *options: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(line.must("up", "--dry-run", "--json", *options).out)
    return result


def test_the_guide_names_what_four_nodes_cost(line: CommandLine) -> None:
    page = (Path(__file__).parents[3] / "docs" / "getting-started.md").read_text()
    line.cloud.faults(DENIED)  # so that the table serves

    rows = re.findall(r"\| 4 \| `([\w.-]+)` .*\$([\d.]+) \| \$(\d+) \|", page)
    assert len(rows) == 2
    for kind, hour, most in rows:
        planned = plan(line, "--nodes", "4", "--instance-type", kind)
        assert planned["usd_per_hour"] == pytest.approx(float(hour), abs=0.006)
        assert planned["usd_at_most"] == pytest.approx(float(most), abs=0.6)


def test_another_regions_price_is_never_the_most_that_it_can_cost(line: CommandLine) -> None:
    line.cloud.faults(DENIED)

    text = line.must("up", "--dry-run", "--region", "eu-west-1").out
    as_json = plan(line, "--region", "eu-west-1")

    assert "Price: unknown in eu-west-1. In us-east-1: $6.60 an hour" in text
    assert "Prices: no permission for GetProducts." in text
    assert "At most" not in text
    assert (as_json["usd_per_hour"], as_json["usd_at_most"]) == (None, None)
    assert as_json["prices_as_of"] == "table of July 2026, us-east-1; unknown in eu-west-1"
    assert as_json["price_problem"] == "no permission for GetProducts"
    # In the table's own region, it serves.
    here = plan(line)
    assert here["prices_as_of"] == "table of July 2026, us-east-1"
    assert here["usd_at_most"] == pytest.approx(_HOURS * 6.5980, rel=0.001)


def test_the_free_cloud_shows_what_aws_would_cost(line: CommandLine) -> None:
    local = ("--cloud", "local", "--nodes", "2")
    note = r"Free here. On AWS: about \$13.20 an hour, at most \$113.2\d \(table of July 2026, us-east-1\)."
    planned = plan(line, *local)
    assert re.fullmatch(note, *planned["notes"])
    assert planned["usd_per_hour"] == 0
    assert re.search(note, line.must("up", *local).err)
    assert "On AWS" not in line.must("up", *local).err
    # Jobs may extend it to 20 hours.
    (longer, *_) = plan(line, *local, "--max-time", "20h", "--name", "other")["notes"]
    assert re.search(r"at most \$265.0\d ", longer)
    spot = ("--market", "spot", "--max-price", "3", "--ttl", "1h", "--name", "third")
    (on_spot,) = plan(line, *local, *spot)["notes"]
    # Two nodes with disk and address, for an hour and a half.
    most = r"at most \$9.66 with --max-price 3 \("
    assert re.search(rf"about \$13.20 an hour on demand, {most}", on_spot)
    assert not [call for call in line.call_log.calls if call.action == "pricing:GetProducts"]


def test_prices_are_asked_for_once_and_the_cost_so_far_has_their_source(line: CommandLine) -> None:
    plan(line, "--nodes", "4")
    line.must("up", "--nodes", "1", "--yes")
    listed = line.must("list").out
    status = json.loads(line.must("status", "--json").out)

    asked = [call for call in line.call_log.calls if call.action == "pricing:GetProducts"]
    assert len(asked) == 2  # the type, and gp3
    assert {call.region for call in asked} == {"us-east-1"}
    assert status["usd_so_far"] is not None
    assert status["price_source"].startswith("Price List API, 20")
    assert f" so far at on-demand prices ({status['price_source']})" in listed


def test_the_events_hold_the_price_of_the_zone(line: CommandLine) -> None:
    # Only the last zone is that cheap.
    line.must("up", "--nodes", "2", "--market", "spot", "--max-price", "2.3", "--yes")

    events = [json.loads(row) for row in ClusterFiles.of("spr").events.read_text().splitlines()]
    (bought,) = [event for event in events if event["event"] == "bought"]
    planned = next(event for event in events if event["event"] == "plan")
    accepted = next(event for event in events if event["event"] == "accepted")
    assert bought["market"] == "spot"
    assert bought["usd_per_hour"] == pytest.approx(0.35 * 6.5472, abs=1e-5)
    assert planned["usd_per_hour"] == pytest.approx(2 * 6.5980, abs=1e-3)
    assert planned["price_source"].startswith("Price List API, ")
    assert "Price List API, " in accepted["what"]


def test_spot_is_shown_by_zone_and_a_maximum_price_limits_it(line: CommandLine) -> None:
    spot = plan(line, "--market", "spot", "--max-price", "3")
    shown = line.must("up", "--dry-run", "--market", "spot", "--max-price", "2.5").out
    assert "Spot: now $2.2915 each (r7iz.metal-16xl in us-east-1f" in shown
    assert "At most $2.5 for each machine." in shown
    assert "Quota L-34B43A08" in shown

    places = [f"r7iz.metal-16xl in {zone}" for zone in spot["zones"]]
    assert [*spot["spot_usd_per_hour"]] == places
    assert sorted(spot["zones"], reverse=True) == spot["zones"]
    assert len(places) == 5
    assert spot["usd_at_most"] == pytest.approx(_HOURS * (3 + 6.5980 - 6.5472), abs=0.01)
    either = plan(line, "--market", "spot-or-on-demand", "--max-price", "3")
    assert either["usd_at_most"] == pytest.approx(_HOURS * 6.5980, abs=0.01)
    text = line.must("up", "--dry-run", "--market", "spot-or-on-demand", "--max-price", "2").out
    assert "Spot: now $" in text
    assert "At most $2 " not in text


# Types that the table does not know


def test_a_type_that_only_ec2_knows_lives_from_up_to_down(line: CommandLine) -> None:
    name = "c8in.8xlarge"
    options = ["--nodes", "2", "--instance-type", name]
    planned = plan(line, *options)
    assert planned["quota"]["vcpus_needed"] == 2 * 32
    assert planned["usd_per_hour"] == pytest.approx(2 * (32 * 0.05 + 0.0161), abs=1e-3)

    up = json.loads(line.must("up", *options, "--yes", "--json").out)
    assert [node["type"] for node in up["nodes"]] == [name, name]
    assert plan(line)["quota"]["vcpus_needed"] is None
    line.lose(line.ids()[1])
    line.must("repair", "--yes")
    status = json.loads(line.must("status", "--json").out)
    assert status["usd_so_far"] is not None
    assert line.run("verify", "--json").code in (0, 1)


def test_metal_without_a_size_is_taken_with_a_line(line: CommandLine) -> None:
    result = line.must("up", "--dry-run", "--instance-type", "r7iz.metal,m7i.metal")

    assert result.err.startswith(
        "r7iz.metal: using r7iz.metal-16xl, the family's smallest bare metal\n"
        "m7i.metal: using m7i.metal-24xl, the family's smallest bare metal\n"
    )
    assert "1 x r7iz.metal-16xl or m7i.metal-24xl" in result.out
    line.cloud.faults("[quota]\non_demand_vcpus = 0\n")  # it does not count this type
    quota = plan(line, "--instance-type", "x8i.metal-48xl")["quota"]
    assert (quota["code"], quota["vcpus_held"]) == (None, None)


def test_little_memory_and_unknown_amx_are_said(line: CommandLine) -> None:
    assert plan(line, "--instance-type", "m6i.large", "--allow-no-amx")["warnings"] == []
    small = plan(line, "--instance-type", "t3.medium", "--allow-no-amx")
    assert small["warnings"] == ["t3.medium has 4 GiB of memory: too little to train BERT."]
    unknown = line.must("up", "--dry-run", "--instance-type", "c8in.metal-48xl").out
    assert "It is not known whether c8in.metal-48xl has AMX" in unknown


def test_idle_connections_are_tracked_for_a_day_where_ec2_forgets_them_in_minutes(
    line: CommandLine,
) -> None:
    line.must("up", "--nodes", "1", "--instance-type", "c8i.metal-48xl", "--yes")

    (launch,) = [c for c in line.call_log.calls if c.action == "ec2:RunInstances"]
    key = "NetworkInterface.1.ConnectionTrackingSpecification.TcpEstablishedTimeout"
    assert launch.parameters[key] == "86400"


def test_loading_the_disks_is_extra_so_no_most_is_promised(line: CommandLine) -> None:
    loading = line.must("up", "--dry-run", "--volume-init-rate", "200").out

    assert "Image, traffic, and loading the disks are extra." in " ".join(loading.split())
    assert "At most" not in loading
    assert plan(line, "--volume-init-rate", "200")["usd_at_most"] is None
    line.must("up", "--nodes", "1", "--volume-init-rate", "200", "--yes")
    later = line.must("up", "--dry-run").out
    assert "Image and traffic are extra." in later
    assert "At most" in later, "nothing is loaded again"


def test_a_limit_for_jobs_is_shown_as_money_and_must_pay_for_the_time_to_live(
    line: CommandLine,
) -> None:
    usd = plan(line)["usd_per_hour"]
    text = " ".join(line.must("up", "--dry-run", "--budget", "100").out.split())

    shown = re.search(r"At most \$([\d.]+) until", text)
    # Seconds pass between the two plans.
    assert shown
    assert float(shown[1]) == pytest.approx((8 + 1 / 12) * usd, abs=0.02)
    assert f"and ${usd / 2:.2f} more if results wait for `fetch` (--grace 30m)" in text
    all_ = re.search(r"at most \$([\d.]+) in all if jobs extend it", text)
    assert all_
    assert float(all_[1]) == pytest.approx(100, abs=0.01)
    hours = plan(line, "--max-time", "10h")["usd_at_most"] / usd
    assert hours == pytest.approx(10 + 1 / 12, abs=0.002)
    refused = line.run("up", "--dry-run", "--budget", "20")
    assert refused.code == 2
    pays = "--budget 20: it pays for 3 h 2 min at $6.60 an hour; the nodes may run 8 h 35 min"
    assert pays in refused.err
    fits = refused.err.partition("what fits: --ttl ")[2].split()[0]
    assert plan(line, "--budget", "20", "--ttl", fits)["usd_at_most"] <= 20
    unknown = line.run("up", "--dry-run", "--budget", "900", "--volume-init-rate", "200")
    assert "the price of these nodes is unknown" in unknown.err


@pytest.mark.parametrize("has_old", [False, True])
def test_a_new_clusters_time_begins_when_the_user_has_answered(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch, *, has_old: bool
) -> None:
    options = ("--nodes", "1", "--ttl", "1h", "--max-time", "9h")
    if has_old:
        # Its deadline stays, because machines that EC2 does not list yet have it.
        line.cloud.faults("[[capacity]]\nfree = 0\n")
        assert line.run("up", *options, "--yes").code == 1
        line.cloud.faults("")

    def think(*_: object, **__: object) -> None:
        line.cloud.clock.now += 40 * 60

    monkeypatch.setattr("cluster.cli.up.confirm", think)
    bought = len(line.cloud.purchases())
    result = line.run("up", *options)

    assert result.code == int(has_old)
    assert ("too little of the time to live is left" in result.message) is has_old
    assert (len(line.cloud.purchases()) == bought) is has_old
    record = describe_inventory(line.cloud.ec2, "spr").record
    assert record
    assert record.bound
    if not has_old:
        assert record.expires - line.cloud.ctx.now() > timedelta(minutes=50)
        assert record.bound - record.created == timedelta(hours=9)


def test_repair_ends_no_stopped_worker_if_too_little_time_is_left_for_another(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    inventory = describe_inventory(line.cloud.ec2, "spr")
    (worker,) = (machine.id for machine in inventory.alive if machine.role == WORKER)
    line.cloud.ec2.stop_instances(InstanceIds=[worker])
    assert inventory.record
    left = inventory.record.expires - line.cloud.ctx.now()
    line.cloud.clock.now += left.total_seconds() - 30 * 60

    def think(*_: object, **__: object) -> None:
        line.cloud.clock.now += 6 * 60

    monkeypatch.setattr("cluster.cli.up.confirm", think)
    result = line.run("repair")

    assert "too little of the time to live is left" in result.message
    assert "spr-cluster extend 2h --name spr" in result.message
    alive = {
        machine.id: machine.state for machine in describe_inventory(line.cloud.ec2, "spr").alive
    }
    assert alive[worker] == "stopped"


def test_a_time_to_live_must_fit_all_that_comes_before_the_last_purchase(line: CommandLine) -> None:
    options = ("up", "--dry-run", "--nodes", "4", "--instance-type", "m7i.metal-24xl", "--bake")
    assert "--ttl 45m or more" in line.run(*options, "head", "--ttl", "40m").err
    line.must(*options, "head", "--ttl", "45m")
    assert "--ttl 30m or more" in line.run(*options, "none", "--ttl", "28m").err
    line.must(*options, "none", "--ttl", "30m")


def test_a_short_time_to_live_begins_anew_with_each_try_while_there_is_no_capacity(
    line: CommandLine,
) -> None:
    line.cloud.faults("[[capacity]]\nfree = 0\n")
    wait = ("--ttl", "30m", "--wait-for-capacity", "3m", "--subnet-id", subnet_of(line))
    # Two minutes of the time to live are too many to buy anything.
    assert "waited 3 min" in line.run("up", "--nodes", "1", *wait, "--yes").message
    record = describe_inventory(line.cloud.ec2, "spr").record
    assert record
    assert record.expires - line.cloud.ctx.now() > timedelta(minutes=28)
