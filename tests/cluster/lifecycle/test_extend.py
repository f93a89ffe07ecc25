"""A longer life: on the nodes first, then in the tags; interrupted, it can be said again."""

from __future__ import annotations

from datetime import timedelta

import pytest

from cluster.lifecycle.reconcile import extend
from infra import tags
from infra.errors import HostsError, SprError, UsageError
from infra.record import Record
from tests.harness.simulated_cloud import NAME, ParkCloud

HOUR = timedelta(hours=1)


def run(park_cloud: ParkCloud, more: timedelta) -> Record:
    return extend(park_cloud.ctx, NAME, more)


def ends(park_cloud: ParkCloud) -> set[str]:
    """The end of the cluster's life as every tag tells it."""
    found = park_cloud.found()
    all_tags = [group.tags for group in found.security_groups]
    all_tags += [machine.tags for machine in found.instances]
    return {labels[tags.EXPIRES] for labels in all_tags}


def told(park_cloud: ParkCloud) -> set[int]:
    """The end of life that each node was told, in seconds since 1970."""
    nodes = park_cloud.cluster().nodes
    return {park_cloud.machine(node.instance.id).get("expires", 0) for node in nodes}


def test_all_nodes_and_all_tags_get_the_new_time(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=3, ttl=2 * HOUR)

    record = run(park_cloud, HOUR)

    assert ends(park_cloud) == {park_cloud.expires(3 * HOUR)}
    assert told(park_cloud) == {int(record.expires.timestamp())}
    assert tags.render_time(record.expires) == park_cloud.expires(3 * HOUR)
    assert not park_cloud.plan().changes
    assert park_cloud.recorder.operations().count("CreateTags") == 4  # one of them for all


def test_twice_adds_up(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=1, ttl=2 * HOUR)

    run(park_cloud, HOUR)
    run(park_cloud, HOUR)

    assert ends(park_cloud) == {park_cloud.expires(4 * HOUR)}


def test_later_nodes_get_the_new_time_too(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=2, ttl=2 * HOUR)
    run(park_cloud, 5 * HOUR)
    park_cloud.clock.sleep(3 * 3600)

    park_cloud.up(nodes=3)

    assert ends(park_cloud) == {park_cloud.expires(7 * HOUR)}
    new = park_cloud.recorder.of("RunInstances")[-1]
    assert park_cloud.expires(7 * HOUR) in str(new["TagSpecifications"])


def test_interrupted_it_can_be_said_again(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=2, ttl=2 * HOUR)
    for action in ("DescribeInstances", "CreateTags"):
        park_cloud.faults(f'[[error]]\naction = "{action}"\ncode = "UnauthorizedOperation"\n')
        with pytest.raises(Exception, match="UnauthorizedOperation"):
            run(park_cloud, HOUR)
    park_cloud.faults("")
    assert ends(park_cloud) == {park_cloud.expires(2 * HOUR)}

    run(park_cloud, HOUR)

    assert ends(park_cloud) == {park_cloud.expires(3 * HOUR)}
    assert told(park_cloud) == {int(park_cloud.began) + 3 * 3600}


def test_a_node_that_can_not_be_told_is_named_and_the_tags_promise_no_less_than_any_node(
    park_cloud: ParkCloud,
) -> None:
    park_cloud.made(nodes=2, ttl=2 * HOUR)
    worker = park_cloud.cluster().workers[0].instance.id
    park_cloud.break_ssh(worker)

    with pytest.raises(
        HostsError, match=r"extending failed on 1 of 2 nodes:\s+\[node1\]"
    ) as caught:
        run(park_cloud, HOUR)
    assert list(caught.value.outcomes) == ["node1"]
    assert ends(park_cloud) == {park_cloud.expires(3 * HOUR)}
    assert max(told(park_cloud)) == int(park_cloud.began) + 3 * 3600
    assert "`spr-cluster extend 1m --name bert" in str(caught.value)

    park_cloud.mend_ssh(worker)
    record = run(park_cloud, timedelta(minutes=1))
    assert told(park_cloud) == {int(record.expires.timestamp())}


def test_thirty_days_from_now_on_are_the_most(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=1, ttl=2 * HOUR)

    with pytest.raises(UsageError, match="at most 30 days from now on"):
        run(park_cloud, timedelta(days=30))
    assert ends(park_cloud) == {park_cloud.expires(2 * HOUR)}
    assert told(park_cloud) == {0}
    run(park_cloud, timedelta(days=29))
    park_cloud.clock.sleep(10 * 24 * 3600)
    run(park_cloud, timedelta(days=10))


def test_a_life_that_is_over_can_not_be_extended(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=1, ttl=HOUR)
    park_cloud.clock.sleep(3600)

    with pytest.raises(SprError, match="the time to live of cluster 'bert' is over"):
        run(park_cloud, HOUR)


def test_there_must_be_a_cluster(park_cloud: ParkCloud) -> None:
    with pytest.raises(UsageError, match="no cluster 'bert' is running"):
        run(park_cloud, HOUR)


def test_without_a_record_nothing_can_be_extended(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=1)
    group = park_cloud.found("security_groups").group
    assert group is not None
    park_cloud.ec2.delete_tags(Resources=[group.id], Tags=[{"Key": "spr-cluster:nodes"}])

    with pytest.raises(SprError, match="cluster 'bert' has no record"):
        run(park_cloud, HOUR)
