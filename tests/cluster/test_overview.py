"""All clusters of an account: what they are, what they cost, and which were forgotten."""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError

import cluster.overview
from cluster.cli.status import _summary
from cluster.local_files import ClusterFiles, EventLog
from cluster.overview import Overview, describe_regions, list_clusters
from infra.aws.clients import Clients
from infra.cost.prices import Price, Prices, table_prices
from infra.ec2 import tags
from infra.ec2.instances import HEAD, Instance
from infra.ec2.inventory import Inventory, Resource
from infra.ec2.key_pair import KeyPair, generate_key_pair
from infra.ec2.tags import render_time
from infra.files import write_private
from tests.harness.simulated_cloud import SimulatedCloud
from tests.infra.plan_inputs import (
    KEY_PAIR,
    NOW,
    make_found,
    make_group,
    make_image,
    make_machine,
    make_machines,
    make_spec,
)
from tests.infra.resource_factory import ResourceFactory

SPEC = make_spec(3)  # made at NOW, for eight hours
WHOLE = make_found(SPEC)
KEPT = Inventory(
    images=(make_image(**{tags.KEPT: "yes"}),), snapshots=(Resource("snap-of-ami-1", {}),)
)
HOUR = timedelta(hours=1)


def look(found: Inventory, *, billed: bool = True) -> Overview:
    prices = table_prices("us-east-1", ["r7iz.metal-16xl"])
    return Overview("bert", "us-east-1", found, billed, prices)


def without_machines(found: Inventory) -> Inventory:
    return replace(found, instances=())


def not_connected(found: Inventory) -> Inventory:
    head, *workers = found.instances
    other = replace(head, tags={**head.tags, tags.MESH: "of other nodes"})
    return replace(found, instances=(other, *workers))


def broken_record() -> Inventory:
    group = make_group(SPEC)
    labels = {**group.tags, tags.EXPIRES: "one day", "spr-cluster:nodes": "lots"}
    return make_found(SPEC, security_groups=(replace(group, tags=labels),))


def of(*machines: Instance) -> Inventory:
    return make_found(SPEC, instances=machines)


NEVER_CONNECTED = of(make_machine(0, HEAD), make_machine(1))


@pytest.mark.parametrize(
    ("found", "minutes", "state", "orphan"),
    [
        (Inventory(), 60, "none", False),
        (WHOLE, 5, "running", False),
        (WHOLE, 480, "grace", False),
        (WHOLE, 510, "expired", True),
        (of(*make_machines(2)), 60, "degraded", False),
        (of(*make_machines(2), make_machine(2, state="stopped")), 60, "degraded", False),
        (of(*make_machines(2), make_machine(2, state="pending")), 60, "starting", False),
        (not_connected(WHOLE), 5, "degraded", False),
        (without_machines(WHOLE), 39, "no machines", False),
        (without_machines(WHOLE), 60, "no machines", True),
        (without_machines(WHOLE), 540, "expired", True),
        (of(make_machine(0, state="shutting-down")), 60, "no machines", False),
        (KEPT, 600_000, "kept image", False),
        (replace(KEPT, images=(make_image(),)), 60, "expired", True),
        (replace(KEPT, key_pairs=WHOLE.key_pairs), 60, "expired", True),
        (Inventory(snapshots=KEPT.snapshots), 60, "expired", True),
        (Inventory(volumes=(Resource("vol-1", {}),)), 60, "expired", True),
        (Inventory(instances=make_machines(1)), 5, "degraded", False),
        (broken_record(), 5, "degraded", False),
        (without_machines(broken_record()), 60, "expired", True),
        # Another machine's `up` may be working on a new one.
        (NEVER_CONNECTED, 39, "starting", False),
        (NEVER_CONNECTED, 41, "degraded", False),
        (of(make_machine(1), make_machine(2)), 5, "degraded", False),
        (of(*map(make_machine, range(3))), 5, "starting", False),
    ],
)
def test_the_state_of_a_cluster(found: Inventory, minutes: int, state: str, orphan: bool) -> None:
    overview, now = look(found), NOW + timedelta(minutes=minutes)

    assert overview.state(now) == state
    assert overview.is_orphan(now) is orphan


def test_an_interrupted_up_of_this_machine_is_not_starting() -> None:
    files = ClusterFiles.of("bert")
    write_private(files.key, KEY_PAIR.private)

    assert look(NEVER_CONNECTED).state(NOW) == "degraded"
    with files.lock("up"):
        assert look(NEVER_CONNECTED).state(NOW) == "starting"


@pytest.mark.parametrize(
    ("key", "bought", "removal", "orphan"),
    [
        (KEY_PAIR, None, False, False),
        (KEY_PAIR, -1, False, False),
        (KEY_PAIR, 1, False, True),
        (KEY_PAIR, None, True, True),
        (generate_key_pair("of another cluster with this name"), 1, True, False),
    ],
)
def test_on_an_idle_machine_that_bought_them_machines_have_ended(
    key: KeyPair, bought: int | None, removal: bool, orphan: bool
) -> None:
    files, now = ClusterFiles.of("bert"), NOW + timedelta(minutes=7)
    write_private(files.key, key.private)
    if bought is not None:
        time = NOW + timedelta(minutes=bought)
        EventLog(files.events, now=lambda: time).record("bought", "", resources=["i-1"])
    if removal:
        write_private(files.removal, "aws us-east-1 1")

    empty = look(without_machines(WHOLE))
    assert empty.is_orphan(now) is orphan
    with files.lock("up"):
        assert not empty.is_orphan(now)


@pytest.mark.parametrize(
    ("labels", "launched", "left", "now", "state", "orphan"),
    [
        ({tags.MESH: "x"}, 1, 20, 30, "terminated", True),
        ({tags.MESH: "x"}, 1, 25, 30, "terminated", False),
        ({tags.MESH: "x"}, 1, None, 30, "terminated", False),
        ({tags.MESH: "x"}, 1, 20, 30, "shutting-down", False),
        ({tags.MESH: "x"}, -1, 20, 30, "terminated", False),
        ({}, 1, 20, 30, "terminated", False),
        ({}, 1, 20, 50, "terminated", True),
        ({}, 1, 45, 50, "terminated", False),
        ({}, 1, 20, 50, "shutting-down", False),
    ],
)
def test_elsewhere_they_have_ended_if_they_were_connected_and_none_follows_for_ten_minutes(
    labels: dict[str, str], launched: int, left: int | None, now: int, state: str, orphan: bool
) -> None:
    def at(minutes: int) -> datetime:
        return NOW + timedelta(minutes=minutes)

    ended = replace(make_machine(0, HEAD, state=state, labels=labels), launch_time=at(launched))
    ended = replace(ended, left=None if left is None else at(left))
    overview = replace(look(without_machines(WHOLE)), terminated=(ended,))
    assert overview.is_orphan(at(now)) is orphan


def test_it_is_over_when_the_last_of_its_ends_has_come() -> None:
    """An interrupted `extend` has told only some of the machines."""
    later = {tags.EXPIRES: render_time(NOW + 10 * HOUR)}
    found = make_found(SPEC, instances=(*make_machines(2), make_machine(2, labels=later)))

    assert look(found).expires == NOW + 10 * HOUR
    assert not look(found).is_orphan(NOW + 9 * HOUR)
    assert look(found).is_orphan(NOW + 10 * HOUR)
    group = make_group(SPEC)
    damaged = replace(group, tags={**group.tags, "spr-cluster:nodes": "lots"})
    overview = look(make_found(SPEC, security_groups=(damaged,)))
    assert overview.record is None
    assert "grace until 20:30 UTC" in _summary(overview, NOW + 8.2 * HOUR, "--name bert")


@pytest.mark.parametrize(
    ("guarded", "minutes", "stuck"),
    [(False, 4, False), (False, 5, True), (True, 14, False), (True, 15, True)],
)
def test_a_machine_that_outlives_its_cluster_is_named(
    guarded: bool, minutes: int, stuck: bool
) -> None:
    spec = make_spec(1, second_guard=guarded)
    now = NOW + 8.5 * HOUR + timedelta(minutes=minutes)
    text = _summary(look(make_found(spec)), now, "--name bert")
    assert ("but i-0 did not shut down and still costs money." in text) is stuck
    assert "To remove what is left: spr-cluster down --name bert" in text


@pytest.mark.parametrize(("others", "hours"), [(0, 1), (0, 9), (1, 1), (1, 9)])
def test_no_end_is_promised_for_stopped_machines(others: int, hours: int) -> None:
    stopped, *rest = make_machines(1 + others)
    found = make_found(SPEC, instances=(replace(stopped, state="stopped"), *rest))
    text = _summary(look(found), NOW + hours * HOUR, "--name bert")

    assert "Stopped: i-0. No timer ends a stopped machine, its disk is billed, and it may" in text
    assert "results. How to start the head: spr-cluster up --name bert\n" in f"{text}\n"
    assert ("Nodes are set to shut down" in text) is (others == 1 and hours == 1)
    assert ("To remove what is left" in text) is (others == 1 and hours == 9)
    # Nobody is sent to `up` for what is only on a stopped worker.
    head, worker = make_machines(2)
    found = make_found(SPEC, instances=(head, replace(worker, state="stopped")))
    text = _summary(look(found), NOW + hours * HOUR, "--name bert")
    assert "Stopped: i-1." in text
    replaced = "`up` and `repair` replace a stopped worker and delete its disk"
    assert (replaced if hours == 1 else "`down` deletes its disk.") in text
    assert "spr-cluster up" not in text
    # After its time, a machine that starts would end with its disk.
    start = "aws ec2 start-instances --region us-east-1 --instance-ids i-1"
    assert (start in text) is (hours == 1)


def test_the_cost_so_far_is_zero_where_nothing_is_billed() -> None:
    now = NOW + 2 * HOUR

    # With 100 GiB of gp3 and a public address each.
    each = 6.5472 + 100 * 0.08 / 720 + 0.005
    cost = look(WHOLE).cost(now)
    assert cost is not None
    assert cost.usd == pytest.approx(3 * 2 * each, rel=0.001)
    assert cost.source == "table of July 2026, us-east-1"
    assert look(WHOLE, billed=False).cost(now) == Price(0.0, "")

    log = EventLog(ClusterFiles.of("bert").events, now=lambda: NOW)
    log.record("bought", "", resources=["i-lost"])
    replace(log, now=lambda: NOW + HOUR).record("plan", "", resources=[])
    assert look(WHOLE).cost(now) == cost, "the log of another cluster with its name"
    write_private(ClusterFiles.of("bert").key, KEY_PAIR.private)
    after = look(WHOLE).cost(now)
    assert after is not None
    assert after.usd == pytest.approx(7 * each, rel=0.001), "a replaced machine ran for an hour"

    log.record("bought", "", resources=["i-missed", WHOLE.instances[0].id])
    assert look(WHOLE).cost(now) == after, "EC2 does not say when it ended"
    ended = replace(make_machine(0), id="i-missed", left=NOW + HOUR)
    shorter = replace(look(WHOLE), terminated=(ended,)).cost(now)
    assert shorter is not None
    assert shorter.usd == pytest.approx(8 * each, rel=0.001)

    # Its machines were bought at NOW and ended after an hour, as EC2 says for a while.
    log.record("bought", "", resources=[m.id for m in WHOLE.instances], type="r7iz.metal-16xl")
    gone = look(without_machines(WHOLE))
    ends = [ended, *(replace(m, left=NOW + HOUR) for m in WHOLE.instances)]
    log.record("bought", "", resources=["i-dead"])
    log.record("faulty", "", resources=["i-dead"], ran=False)
    told = replace(gone, terminated=ends)
    for overview, hours in ((told, 5), (gone, 1 + 4 * 8.5)):
        cost = overview.cost(NOW + 20 * HOUR)
        assert cost
        assert cost.usd == pytest.approx(hours * each, rel=0.001)
        assert cost.is_most == (overview is gone)
    log.record("bought", "", resources=[ended.id], market="spot")
    assert "at most" in str(told.cost(now))


def test_a_stopped_machine_costs_its_disk_and_a_restarted_one_at_most_its_whole_time() -> None:
    now, (machine,) = NOW + 10 * HOUR, make_machines(1)

    def cost(**changes: Any) -> Price:
        found = look(make_found(SPEC, instances=(replace(machine, **changes),))).cost(now)
        assert found
        return found

    whole, disk = cost(), table_prices("us-east-1", []).disk(SPEC.volume_gib)
    stopped = cost(state="stopped", left=NOW + 4 * HOUR)
    restarted = cost(launch_time=now, first_launch=NOW)
    assert disk
    assert stopped.usd == pytest.approx(0.4 * whole.usd + 6 * disk.usd)
    assert (str(whole), str(restarted)) == (f"${whole.usd:.2f}", f"at most ${whole.usd:.2f}")


@pytest.mark.parametrize("spot", ["", "sir-1"])
def test_on_spot_the_price_on_demand_is_the_most(spot: str) -> None:
    machines = (*make_machines(2), make_machine(2, spot_request=spot))
    text = _summary(look(make_found(SPEC, instances=machines)), NOW + HOUR, "--name bert")

    most = "at most $19.68 so far at on-demand prices (table of July 2026"
    assert (most if spot else ", $19.68 so far (table of July 2026") in text


def test_as_a_dictionary() -> None:
    result = look(WHOLE).as_dict(NOW + HOUR)

    assert result == {
        "cluster": "bert",
        "region": "us-east-1",
        "state": "running",
        "nodes": 3,
        "wanted_nodes": 3,
        "age_s": 3600,
        "left_s": 7 * 3600,
        "latest": "2026-07-31T20:30:00Z",
        "usd_so_far": 19.68,
        "price_source": "table of July 2026, us-east-1",
        "owner": None,
        "resources": WHOLE.ids(),
    }
    lost = look(replace(WHOLE, security_groups=())).as_dict(NOW + HOUR)
    assert lost["age_s"] == 3600, "since the first launch, without the record"
    head, *others = WHOLE.instances
    later = replace(WHOLE, instances=(*others, replace(head, launch_time=NOW + 2 * HOUR)))
    assert look(later).as_dict(NOW + 3 * HOUR)["age_s"] == 3 * 3600, "since it was created"
    rest = look(Inventory(volumes=(Resource("vol-1", {}),))).as_dict(NOW)
    assert (rest["wanted_nodes"], rest["age_s"], rest["left_s"]) == (None, None, None)
    assert replace(look(WHOLE), prices=Prices()).as_dict(NOW)["usd_so_far"] is None


def test_the_regions_are_ec2s_and_each_is_looked_into(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.fake.application.open_region("eu-west-1")
    ResourceFactory(cloud.fake, "bert").key_pairs()
    regions = describe_regions(cloud.ctx.clients)
    assert regions == ("eu-west-1", "us-east-1")
    create, threads = Clients._client, list[threading.Thread]()

    def create_here(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return create(*args)

    monkeypatch.setattr(Clients, "_client", create_here)
    listed, closed = list_clusters(cloud.ctx.cloud, regions)

    assert set(threads) == {threading.main_thread()}, "a session creates clients in one thread"
    assert [(overview.region, overview.name) for overview in listed] == [("us-east-1", "bert")]
    assert closed == {}


def test_a_closed_region_or_scheduler_is_named_and_the_rest_is_listed(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.prepared(nodes=1)
    open_, shut = cloud.ctx.clients, copy(cloud.ctx.clients)

    def refuse(*_: Any, **__: Any) -> Any:
        result: Any = {"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}
        raise ClientError(result, "DescribeInstances")

    shut.ec2 = Mock(get_paginator=refuse)
    monkeypatch.setattr(
        cluster.overview, "connect", lambda c: shut if c.region == "eu-west-1" else open_
    )
    (listed,), closed = list_clusters(cloud.ctx.cloud, ("eu-west-1", "us-east-1"))
    assert listed.name == "bert"
    assert list(closed) == ["eu-west-1"]
    assert "no permission for DescribeInstances" in closed["eu-west-1"]
    with pytest.raises(ClientError):
        list_clusters(cloud.ctx.cloud, ("eu-west-1",))

    def fail(operation: str, _: object) -> None:
        raise ClientError({"Error": {"Code": "InternalServerException"}}, operation)

    monkeypatch.setattr(open_.scheduler, "_make_api_call", fail)
    (listed,), closed = list_clusters(cloud.ctx.cloud, ("us-east-1",))
    assert len(listed.found.alive) == 1, "machines cost money"
    assert "ListScheduleGroups" in closed["us-east-1"]
