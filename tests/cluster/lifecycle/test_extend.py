"""A longer life: on the nodes first, then in the tags; interrupted, it can be said again."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from cluster.lifecycle.deadline import extend, raise_latest
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord
from infra.ec2.instances import label_instances
from infra.errors import HostsError, SprError, UsageError
from infra.lifetime import AFTER
from tests.harness.simulated_cloud import NAME, SimulatedCloud

HOUR = timedelta(hours=1)


def run(simulated_cloud: SimulatedCloud, more: timedelta) -> ClusterRecord:
    return extend(simulated_cloud.ctx, NAME, more)


def ends(simulated_cloud: SimulatedCloud) -> set[str]:
    """The end of the cluster's life as every tag tells it."""
    found = simulated_cloud.found()
    all_tags = [group.tags for group in found.security_groups]
    all_tags += [machine.tags for machine in found.instances]
    return {labels[tags.EXPIRES] for labels in all_tags}


def deadlines(simulated_cloud: SimulatedCloud) -> set[int]:
    """The end of life of each node, in seconds since 1970."""
    nodes = simulated_cloud.cluster().nodes
    return {simulated_cloud.machine(node.instance.id).get("expires", 0) for node in nodes}


def test_all_nodes_and_all_tags_get_the_new_time(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=3, ttl=2 * HOUR)

    record = run(simulated_cloud, HOUR)

    assert ends(simulated_cloud) == {simulated_cloud.expires(3 * HOUR)}
    assert deadlines(simulated_cloud) == {int(record.expires.timestamp())}
    assert tags.render_time(record.expires) == simulated_cloud.expires(3 * HOUR)
    assert not simulated_cloud.plan().changes
    assert (
        simulated_cloud.recorder.operations().count("CreateTags") == 5
    )  # one of them for all nodes


def test_twice_adds_up(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1, ttl=2 * HOUR)

    run(simulated_cloud, HOUR)
    run(simulated_cloud, HOUR)

    assert ends(simulated_cloud) == {simulated_cloud.expires(4 * HOUR)}


def test_later_nodes_get_the_new_time_too(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2, ttl=2 * HOUR)
    run(simulated_cloud, 5 * HOUR)
    simulated_cloud.clock.sleep(3 * 3600)

    simulated_cloud.up(nodes=3)

    assert ends(simulated_cloud) == {simulated_cloud.expires(7 * HOUR)}
    new = simulated_cloud.purchases()[-1]
    assert simulated_cloud.expires(7 * HOUR) in str(new["TagSpecifications"])


def test_an_interrupted_extend_can_be_repeated(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2, ttl=2 * HOUR)
    for action in ("DescribeInstances", "CreateTags"):
        simulated_cloud.faults(f'[[error]]\naction = "{action}"\ncode = "UnauthorizedOperation"\n')
        with pytest.raises(Exception, match="UnauthorizedOperation"):
            run(simulated_cloud, HOUR)
    simulated_cloud.faults("")
    assert ends(simulated_cloud) == {simulated_cloud.expires(2 * HOUR)}

    run(simulated_cloud, HOUR)

    assert ends(simulated_cloud) == {simulated_cloud.expires(3 * HOUR)}
    assert deadlines(simulated_cloud) == {int(simulated_cloud.began) + 3 * 3600}


def test_an_unreachable_node_is_named_and_the_tags_name_no_earlier_time_than_any_node(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=2, ttl=2 * HOUR)
    worker = simulated_cloud.cluster().workers[0].instance.id
    simulated_cloud.break_ssh(worker)

    with pytest.raises(
        HostsError, match=r"extending failed on 1 of 2 nodes:\s+\[node1\]"
    ) as caught:
        run(simulated_cloud, HOUR)
    assert list(caught.value.outcomes) == ["node1"]
    assert ends(simulated_cloud) == {simulated_cloud.expires(3 * HOUR)}
    assert max(deadlines(simulated_cloud)) == int(simulated_cloud.began) + 3 * 3600
    assert "`spr-cluster extend 1m --name bert" in str(caught.value)

    simulated_cloud.mend_ssh(worker)
    record = run(simulated_cloud, timedelta(minutes=1))
    assert deadlines(simulated_cloud) == {int(record.expires.timestamp())}


def test_thirty_days_from_now_on_are_the_most(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1, ttl=2 * HOUR)

    with pytest.raises(UsageError, match="the maximum is 30 days from now"):
        run(simulated_cloud, timedelta(days=30))
    assert ends(simulated_cloud) == {simulated_cloud.expires(2 * HOUR)}
    assert deadlines(simulated_cloud) == {0}
    run(simulated_cloud, timedelta(days=29))
    simulated_cloud.clock.sleep(10 * 24 * 3600)
    run(simulated_cloud, timedelta(days=10))


def test_a_cluster_is_revived_in_its_grace_period_only(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1, ttl=HOUR, grace=HOUR / 2)
    simulated_cloud.clock.sleep(3600)
    with pytest.raises(SprError, match=r"wait for `fetch` until .* and start nothing new"):
        simulated_cloud.plan()

    record = run(simulated_cloud, HOUR)

    assert record.latest - record.expires == HOUR / 2
    assert not simulated_cloud.plan().changes
    simulated_cloud.clock.sleep(5400)
    with pytest.raises(SprError, match="the time to live of cluster 'bert' is over"):
        run(simulated_cloud, HOUR)


def latest(simulated_cloud: SimulatedCloud) -> set[str]:
    """The latest end as every tag and every node tells it."""
    found = simulated_cloud.found()
    labels = [*(group.tags for group in found.security_groups), *(m.tags for m in found.instances)]
    machines = [simulated_cloud.machine(machine.id) for machine in found.instances]
    at = (int(machine["rest"].split()[0]) for machine in machines)
    times = [tags.render_time(datetime.fromtimestamp(each, timezone.utc)) for each in at]
    return {each[tags.LATEST] for each in labels} | set(times)


def test_the_grace_period_moves_along(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2, ttl=2 * HOUR, grace=HOUR)
    assert latest(simulated_cloud) == {simulated_cloud.expires(3 * HOUR)}

    run(simulated_cloud, HOUR)

    assert latest(simulated_cloud) == {simulated_cloud.expires(4 * HOUR)}


def test_jobs_move_only_the_latest_end_and_never_back(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.up(nodes=2, ttl=2 * HOUR, second_guard=True)
    begin = simulated_cloud.cluster().expires
    assert begin
    for hours in (6, 4):
        record = raise_latest(simulated_cloud.ctx, NAME, begin + hours * HOUR)

    assert record.latest == begin + 6 * HOUR
    assert latest(simulated_cloud) == {simulated_cloud.expires(8 * HOUR)}
    assert ends(simulated_cloud) == {simulated_cloud.expires(2 * HOUR)}
    scheduler = simulated_cloud.ctx.clients.scheduler
    (name, *_) = [s["Name"] for s in scheduler.list_schedules()["Schedules"]]
    at = scheduler.get_schedule(Name=name, GroupName="spr-cluster-bert")["ScheduleExpression"]
    assert at == f"at({begin + 6 * HOUR + AFTER:%Y-%m-%dT%H:%M:%S})"


def test_nothing_moves_the_end_beyond_its_limit(simulated_cloud: SimulatedCloud) -> None:
    begin = simulated_cloud.prepared(nodes=1, ttl=2 * HOUR).expires
    group = simulated_cloud.found("security_groups").group
    assert begin
    assert group
    bound = {"spr-cluster:bound": tags.render_time(begin + HOUR)}
    label_instances(simulated_cloud.ec2, [group.id], bound)

    with pytest.raises(UsageError, match="later than --max-time or --budget allows"):
        raise_latest(simulated_cloud.ctx, NAME, begin + 1.1 * HOUR)
    with pytest.raises(UsageError, match="later than --max-time or --budget allows"):
        run(simulated_cloud, HOUR)
    assert raise_latest(simulated_cloud.ctx, NAME, begin + HOUR).latest == begin + HOUR


def test_there_must_be_a_cluster(simulated_cloud: SimulatedCloud) -> None:
    with pytest.raises(UsageError, match="no cluster 'bert' is running"):
        run(simulated_cloud, HOUR)


def test_without_a_record_nothing_can_be_extended(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1)
    group = simulated_cloud.found("security_groups").group
    assert group is not None
    simulated_cloud.ec2.delete_tags(Resources=[group.id], Tags=[{"Key": "spr-cluster:nodes"}])

    with pytest.raises(SprError, match="cluster 'bert' has no record"):
        run(simulated_cloud, HOUR)
