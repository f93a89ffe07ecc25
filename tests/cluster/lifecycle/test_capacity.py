"""Zones, types and markets without room: what is bought instead, and where nothing can be."""

from __future__ import annotations

import re
from typing import Any

import pytest

from infra.ec2.purchase import NoCapacityError
from tests.harness.simulated_cloud import SimulatedCloud


def no_room(zone: str = "*", **more: Any) -> str:
    values = {"zone": f'"{zone}"', "free": 0, **more}
    return "[[capacity]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


def zones(simulated_cloud: SimulatedCloud) -> set[str]:
    return {node.instance.zone for node in simulated_cloud.cluster().nodes}


def test_a_zone_without_room_is_passed_over(simulated_cloud: SimulatedCloud) -> None:
    first = simulated_cloud.first_zone()
    simulated_cloud.faults(no_room(first))

    simulated_cloud.up(nodes=3)

    assert len(zones(simulated_cloud)) == 1
    assert zones(simulated_cloud) != {first}
    assert any(f"in {first}" in note for note in simulated_cloud.progress.notes)


def test_outside_the_placement_group_there_may_be_room(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.faults(no_room(group="true"))

    simulated_cloud.up(nodes=3)

    assert zones(simulated_cloud) == {simulated_cloud.first_zone()}
    assert all("Placement" not in r for r in simulated_cloud.purchases()[-1:])


def test_another_type_is_bought_where_the_first_has_no_room(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults(no_room(instance_type='"r7iz.*"'))

    cluster = simulated_cloud.up(nodes=2, instance_types=("r7iz.metal-16xl", "m7i.metal-24xl"))

    assert {node.instance.instance_type for node in cluster.nodes} == {"m7i.metal-24xl"}


def test_spot_that_is_full_is_bought_on_demand_where_that_is_allowed(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults(no_room(market='"spot"'))

    simulated_cloud.up(nodes=2, market="spot-or-on-demand")

    assert not any(machine.spot_request for machine in simulated_cloud.found("instances").instances)


def test_spot_machines_have_a_request_each(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2, market="spot")

    found = simulated_cloud.found()
    assert len(found.spot_requests) == 2
    assert {m.spot_request for m in found.instances} == {r.id for r in found.spot_requests}


def test_a_head_alone_moves_with_all_to_where_there_is_room(
    simulated_cloud: SimulatedCloud,
) -> None:
    first = simulated_cloud.first_zone()
    dies = "".join(f'[[machine]]\nn = {n}\nfate = "dies"\n' for n in (2, 4))
    simulated_cloud.faults(f'[[capacity]]\nzone = "{first}"\nfree = 1\n{dies}')

    simulated_cloud.up(nodes=3)  # a move is no replacement

    cluster = simulated_cloud.cluster()
    assert cluster.is_whole
    assert len(cluster.nodes) == 3
    assert first not in zones(simulated_cloud)
    found = simulated_cloud.found()
    assert len(found.instances) == 3, "the first head is still there"
    assert simulated_cloud.steps.count("install.sh") == 1, "the image has the software already"


def test_where_nowhere_is_room_all_that_was_tried_is_listed(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults(no_room())

    with pytest.raises(NoCapacityError) as caught:
        simulated_cloud.up(nodes=2, instance_types=("r7iz.metal-16xl", "m7i.metal-24xl"))
    tried = re.findall(r"^  (\S+) in (\S+?)(,|:)", caught.value.message, re.MULTILINE)
    assert {kind for kind, _, _ in tried} == {"r7iz.metal-16xl", "m7i.metal-24xl"}
    assert len(tried) == len(simulated_cloud.purchases())
    assert simulated_cloud.found("instances").instances == ()
    simulated_cloud.down()
    assert simulated_cloud.left() == []


def test_a_cluster_that_works_never_moves_for_a_new_node(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2)
    (zone,) = zones(simulated_cloud)
    simulated_cloud.faults(f'[[capacity]]\nzone = "{zone}"\nfree = 2\n')

    with pytest.raises(NoCapacityError):
        simulated_cloud.up(nodes=3)
    assert len(simulated_cloud.cluster().nodes) == 2
    assert zones(simulated_cloud) == {zone}


def test_a_head_that_may_hold_results_does_not_give_way_to_a_larger_cluster(
    simulated_cloud: SimulatedCloud,
) -> None:
    head = simulated_cloud.prepared(nodes=1).head.instance
    simulated_cloud.faults(f'[[capacity]]\nzone = "{head.zone}"\nfree = 1\n')

    with pytest.raises(NoCapacityError):
        simulated_cloud.up(nodes=3)
    assert simulated_cloud.found("instances").ids()["instances"] == [head.id]
