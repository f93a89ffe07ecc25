"""Zones, types and markets without room: what is bought instead, and where nothing can be."""

from __future__ import annotations

from typing import Any

import pytest

from infra.ec2.purchase import NoCapacityError
from tests.harness.simulated_cloud import SimulatedCloud


def no_room(zone: str = "*", **more: Any) -> str:
    values = {"zone": f'"{zone}"', "free": 0, **more}
    return "[[capacity]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


def zones(cloud: SimulatedCloud) -> set[str]:
    return {node.instance.zone for node in cloud.cluster().nodes}


def test_a_zone_without_room_is_passed_over(cloud: SimulatedCloud) -> None:
    first = cloud.first_zone()
    cloud.faults(no_room(first))

    cloud.up(nodes=3)

    assert len(zones(cloud)) == 1
    assert zones(cloud) != {first}
    assert any(f"in {first}" in note for note in cloud.progress.notes)


def test_outside_the_placement_group_there_may_be_room(cloud: SimulatedCloud) -> None:
    cloud.faults(no_room(group="true"))

    cloud.up(nodes=3)

    assert zones(cloud) == {cloud.first_zone()}
    assert all("Placement" not in r for r in cloud.purchases()[-1:])


def test_another_type_is_bought_where_the_first_has_no_room(cloud: SimulatedCloud) -> None:
    cloud.faults(no_room(instance_type='"r7iz.*"'))

    cluster = cloud.up(nodes=2, instance_types=("r7iz.metal-16xl", "m7i.metal-24xl"))

    assert {node.instance.instance_type for node in cluster.nodes} == {"m7i.metal-24xl"}


def test_spot_that_is_full_is_bought_on_demand_where_that_is_allowed(cloud: SimulatedCloud) -> None:
    cloud.faults(no_room(market='"spot"'))

    cloud.up(nodes=2, market="spot-or-on-demand")

    assert not any(machine.spot_request for machine in cloud.found("instances").instances)


def test_a_head_alone_moves_with_all_to_where_there_is_room(cloud: SimulatedCloud) -> None:
    first = cloud.first_zone()
    dies = "".join(f'[[machine]]\nn = {n}\nfate = "dies"\n' for n in (2, 4))
    cloud.faults(f'[[capacity]]\nzone = "{first}"\nfree = 1\n{dies}')

    cloud.up(nodes=3)  # a move is no replacement

    cluster = cloud.cluster()
    assert cluster.is_whole
    assert len(cluster.nodes) == 3
    assert first not in zones(cloud)
    found = cloud.found()
    assert len(found.instances) == 3, "the first head is still there"
    assert cloud.steps.count("install.sh") == 1, "the image has the software already"


def test_a_cluster_that_works_never_moves_for_a_new_node(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2)
    (zone,) = zones(cloud)
    cloud.faults(f'[[capacity]]\nzone = "{zone}"\nfree = 2\n')

    with pytest.raises(NoCapacityError):
        cloud.up(nodes=3)
    assert len(cloud.cluster().nodes) == 2
    assert zones(cloud) == {zone}


def test_a_head_that_may_hold_results_does_not_give_way_to_a_larger_cluster(
    cloud: SimulatedCloud,
) -> None:
    head = cloud.prepared(nodes=1).head.instance
    cloud.faults(f'[[capacity]]\nzone = "{head.zone}"\nfree = 1\n')

    with pytest.raises(NoCapacityError):
        cloud.up(nodes=3)
    assert cloud.found("instances").ids()["instances"] == [head.id]
