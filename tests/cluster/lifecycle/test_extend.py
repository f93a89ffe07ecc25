"""A longer life: on the nodes first, then in the tags; interrupted, it can be said again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from cluster.lifecycle import deadline
from cluster.lifecycle.deadline import extend, raise_latest
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord
from infra.ec2.instances import label_instances
from infra.errors import HostsError, SprError, UsageError
from infra.lifetime import AFTER
from tests.harness.simulated_cloud import SimulatedCloud

HOUR = timedelta(hours=1)


def run(cloud: SimulatedCloud, more: timedelta) -> ClusterRecord:
    return extend(cloud.ctx, more)


def labels_of(cloud: SimulatedCloud) -> list[dict[str, str]]:
    """The tags of the group and of each machine."""
    found = cloud.found("security_groups", "instances")
    return [*(group.tags for group in found.security_groups), *(m.tags for m in found.instances)]


def ends(cloud: SimulatedCloud) -> set[str]:
    """The end of the cluster's life as every tag tells it."""
    return {labels[tags.EXPIRES] for labels in labels_of(cloud)}


def deadlines(cloud: SimulatedCloud) -> set[int]:
    """The end of life of each node, in seconds since 1970."""
    nodes = cloud.cluster().nodes
    return {cloud.machine(node.instance.id).get("expires", 0) for node in nodes}


def latest(cloud: SimulatedCloud) -> set[str]:
    """The latest end as every tag and every node tells it."""
    machines = [cloud.machine(node.instance.id) for node in cloud.cluster().nodes]
    at = (int(machine["rest"].split()[0]) for machine in machines)
    times = [tags.render_time(datetime.fromtimestamp(each, timezone.utc)) for each in at]
    return {each[tags.LATEST] for each in labels_of(cloud)} | set(times)


def meanwhile(
    cloud: SimulatedCloud,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], object],
    *,
    is_late: bool,
) -> None:
    """Have another command act before the next change, or while it sets the nodes' timers."""
    change = deadline._change

    def act_first(*args: Any) -> ClusterRecord:
        monkeypatch.setattr(deadline, "_change", change)
        act()
        return change(*args)

    def act_late() -> None:
        cloud.steps.before.clear()
        act()

    if is_late:
        cloud.steps.before["spr-cluster-expires"] = act_late
    else:
        monkeypatch.setattr(deadline, "_change", act_first)


def test_all_tags_and_all_nodes_get_the_new_time_later_ones_too(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2, ttl=2 * HOUR)
    assert latest(cloud) == {cloud.expires(2.5 * HOUR)}

    record = run(cloud, HOUR)

    assert ends(cloud) == {cloud.expires(3 * HOUR)}
    assert latest(cloud) == {cloud.expires(3.5 * HOUR)}
    assert deadlines(cloud) == {int(record.expires.timestamp())}
    assert tags.render_time(record.expires) == cloud.expires(3 * HOUR)
    assert not cloud.plan().changes
    assert cloud.recorder.operations().count("CreateTags") == 5  # one of them for all nodes
    cloud.clock.sleep(3600)
    cloud.up(nodes=3)
    assert ends(cloud) == {cloud.expires(3 * HOUR)}
    assert cloud.expires(3 * HOUR) in str(cloud.purchases()[-1]["TagSpecifications"])


def test_an_unreachable_node_is_named_and_the_tags_name_no_earlier_time_than_any_node(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=2, ttl=2 * HOUR)
    worker = cloud.cluster().workers[0].instance.id
    cloud.break_ssh(worker)

    with pytest.raises(
        HostsError, match=r"extending failed on 1 of 2 nodes:\s+\[node1\]"
    ) as caught:
        run(cloud, HOUR)
    assert list(caught.value.outcomes) == ["node1"]
    assert ends(cloud) == {cloud.expires(3 * HOUR)}
    assert max(deadlines(cloud)) == int(cloud.began) + 3 * 3600
    assert "`spr-cluster extend 1m --name bert" in str(caught.value)

    cloud.mend_ssh(worker)
    record = run(cloud, timedelta(minutes=1))
    assert deadlines(cloud) == {int(record.expires.timestamp())}


def test_thirty_days_from_now_on_are_the_most(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1, ttl=2 * HOUR)

    with pytest.raises(UsageError, match="the maximum is 30 days from now"):
        run(cloud, timedelta(days=30))
    assert ends(cloud) == {cloud.expires(2 * HOUR)}
    assert deadlines(cloud) == {0}
    run(cloud, timedelta(days=29))
    cloud.clock.sleep(10 * 24 * 3600)
    run(cloud, timedelta(days=10))


def test_a_cluster_is_revived_in_its_grace_period_only(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1, ttl=HOUR, grace=HOUR / 2)
    cloud.clock.sleep(3600)
    with pytest.raises(SprError, match=r"wait for `fetch` until .* and start nothing new"):
        cloud.plan()

    record = run(cloud, HOUR)

    assert record.latest - record.expires == HOUR / 2
    assert not cloud.plan().changes
    cloud.clock.sleep(5400)
    with pytest.raises(SprError, match="the time to live of cluster 'bert' is over"):
        run(cloud, HOUR)


def test_jobs_move_only_the_latest_end_and_never_back(cloud: SimulatedCloud) -> None:
    cloud.up(nodes=2, ttl=2 * HOUR, second_guard=True)
    begin = cloud.cluster().expires
    assert begin
    for hours in (6, 4):
        record = raise_latest(cloud.ctx, begin + hours * HOUR)

    assert record.latest == begin + 6 * HOUR
    assert latest(cloud) == {cloud.expires(8 * HOUR)}
    assert ends(cloud) == {cloud.expires(2 * HOUR)}
    scheduler = cloud.ctx.clients.scheduler
    (name, *_) = [s["Name"] for s in scheduler.list_schedules()["Schedules"]]
    at = scheduler.get_schedule(Name=name, GroupName="spr-cluster-bert")["ScheduleExpression"]
    assert at == f"at({begin + 6 * HOUR + AFTER:%Y-%m-%dT%H:%M:%S})"


@pytest.mark.parametrize("is_late", [False, True])
def test_two_changes_at_once_both_take_effect(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    begin = cloud.prepared(nodes=1, ttl=2 * HOUR).expires
    assert begin

    def extend_and_change() -> None:
        run(cloud, 5 * HOUR)
        cloud.up(nodes=1, idle_timeout=HOUR)

    meanwhile(cloud, monkeypatch, extend_and_change, is_late=is_late)
    raised = raise_latest(cloud.ctx, begin + 9 * HOUR)

    assert ends(cloud) == {cloud.expires(7 * HOUR)}
    assert deadlines(cloud) == {int((begin + 5 * HOUR).timestamp())}
    assert latest(cloud) == {cloud.expires(11 * HOUR)}
    assert raised.options["idle_timeout"] == HOUR
    assert cloud.machine(cloud.cluster().head.instance.id)["rest"].endswith(" 3600")


def test_up_keeps_an_end_that_moved_while_it_ran(cloud: SimulatedCloud) -> None:
    cloud.up(nodes=2, ttl=2 * HOUR, second_guard=True)
    events, event = cloud.ctx.clients.buyer.meta.events, "provide-client-params.ec2.RunInstances"

    def extend_meanwhile(**_: object) -> None:
        events.unregister(event, extend_meanwhile)
        run(cloud, 5 * HOUR)

    events.register(event, extend_meanwhile)
    cloud.up(nodes=3)

    assert cloud.expires(2 * HOUR) in str(cloud.purchases()[-1]["TagSpecifications"])
    assert ends(cloud) == {cloud.expires(7 * HOUR)}
    machines = [cloud.machine(node.instance.id) for node in cloud.cluster().nodes]
    times = {machine.get("expires", machine["launch_expires"]) for machine in machines}
    assert times == {int(cloud.began) + 7 * 3600}
    scheduler = cloud.ctx.clients.scheduler
    names = [each["Name"] for each in scheduler.list_schedules()["Schedules"]]
    group = "spr-cluster-bert"
    found = [scheduler.get_schedule(Name=name, GroupName=group) for name in names]
    assert len({each["ScheduleExpression"] for each in found}) == 1


def test_an_ended_jobs_latest_end_does_not_limit_extend(cloud: SimulatedCloud) -> None:
    begin = cloud.prepared(nodes=1, ttl=2 * HOUR).expires
    assert begin
    raise_latest(cloud.ctx, begin + 3 * HOUR)
    bound = {"spr-cluster:bound": tags.render_time(begin + 4 * HOUR)}
    label_instances(cloud.ec2, [cloud.group.id], bound)

    assert run(cloud, 2 * HOUR).latest == begin + 3 * HOUR
    assert cloud.ctx.find_job_end() == begin + 2.5 * HOUR
    record = run(cloud, HOUR)
    assert record.expires == begin + 3 * HOUR
    assert record.latest == begin + 3 * HOUR + record.options["grace"]
    assert latest(cloud) == {tags.render_time(record.latest)}


def test_nothing_moves_the_end_beyond_its_limit(cloud: SimulatedCloud) -> None:
    begin = cloud.prepared(nodes=1, ttl=2 * HOUR).expires
    assert begin
    bound = {"spr-cluster:bound": tags.render_time(begin + HOUR)}
    label_instances(cloud.ec2, [cloud.group.id], bound)

    with pytest.raises(UsageError, match="later than --max-time or --budget allows"):
        raise_latest(cloud.ctx, begin + 1.1 * HOUR)
    with pytest.raises(UsageError, match="later than --max-time or --budget allows"):
        run(cloud, HOUR)
    assert raise_latest(cloud.ctx, begin + HOUR).latest == begin + HOUR
    cloud.ec2.delete_tags(Resources=[cloud.group.id], Tags=[{"Key": "spr-cluster:nodes"}])
    with pytest.raises(SprError, match="cluster 'bert' has no record"):
        run(cloud, HOUR)
