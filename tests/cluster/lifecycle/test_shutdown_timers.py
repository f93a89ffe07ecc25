"""Timers that shut nodes down: dead, or with another time than the tags, and set again."""

from __future__ import annotations

from datetime import timedelta

import pytest

from infra.errors import HostsError
from tests.harness.simulated_cloud import SimulatedCloud


def node(cloud: SimulatedCloud, rank: int) -> str:
    return cloud.cluster().nodes[rank].instance.id


def expires(cloud: SimulatedCloud) -> int:
    found = cloud.cluster().head.instance.expires
    assert found is not None
    return int(found.timestamp())


def test_up_sets_the_timer_of_an_existing_node_again(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=3)
    cloud.change_machine(node(cloud, 0), timer="dead")
    cloud.change_machine(node(cloud, 1), expires=1_999_999_999)

    cloud.up(nodes=3)

    for rank in (0, 1):
        machine = cloud.machine(node(cloud, rank))
        assert (machine["timer"], machine["expires"]) == ("runs", expires(cloud))
    assert "expires" not in cloud.machine(node(cloud, 2)), "its timer was right"
    notes = " ".join(cloud.progress.notes)
    assert "set the timer that shuts it down again: node0, node1" in notes
    assert "problems" not in notes


def test_up_gives_running_nodes_an_idle_timeout(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2)

    cloud.up(nodes=3, idle_timeout=timedelta(hours=1))

    for rank in range(3):
        assert cloud.machine(node(cloud, rank))["rest"].endswith(" 3600")
    assert "set the timer that shuts it down again: node0, node1" in cloud.progress.notes


def test_a_timer_that_can_not_be_started_fails_up_and_names_the_node(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2)
    cloud.change_machine(node(cloud, 1), timer="broken")

    with pytest.raises(HostsError, match=r"does not answer: Unit .* is masked") as caught:
        cloud.up(nodes=2)
    assert list(caught.value.outcomes) == ["node1"]
