"""Zones, types and markets without room: what is bought instead, and where nothing can be."""

from __future__ import annotations

import re
from typing import Any

import pytest

from infra.purchase import NoCapacityError
from tests.harness.simulated_cloud import ParkCloud


def no_room(zone: str = "*", **more: Any) -> str:
    values = {"zone": f'"{zone}"', "free": 0, **more}
    return "[[capacity]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


def zones(park_cloud: ParkCloud) -> set[str]:
    return {node.instance.zone for node in park_cloud.cluster().nodes}


def test_a_zone_without_room_is_passed_over(park_cloud: ParkCloud) -> None:
    first = park_cloud.first_zone()
    park_cloud.faults(no_room(first))

    park_cloud.up(nodes=3)

    assert len(zones(park_cloud)) == 1
    assert zones(park_cloud) != {first}
    assert any(f"in {first}" in note for note in park_cloud.notes.told)


def test_outside_the_placement_group_there_may_be_room(park_cloud: ParkCloud) -> None:
    park_cloud.faults(no_room(group="true"))

    park_cloud.up(nodes=3)

    assert zones(park_cloud) == {park_cloud.first_zone()}
    assert all("Placement" not in r for r in park_cloud.recorder.of("RunInstances")[-1:])


def test_another_type_is_bought_where_the_first_has_no_room(park_cloud: ParkCloud) -> None:
    park_cloud.faults(no_room(instance_type='"r7iz.*"'))

    cluster = park_cloud.up(nodes=2, instance_types=("r7iz.metal-16xl", "m7i.metal-24xl"))

    assert {node.instance.instance_type for node in cluster.nodes} == {"m7i.metal-24xl"}


def test_spot_that_is_full_is_bought_on_demand_where_that_is_allowed(
    park_cloud: ParkCloud,
) -> None:
    park_cloud.faults(no_room(market='"spot"'))

    park_cloud.up(nodes=2, spot=True, on_demand_allowed=True)

    assert not any(machine.spot_request for machine in park_cloud.found("instances").instances)


def test_spot_machines_have_a_request_each(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=2, spot=True)

    found = park_cloud.found()
    assert len(found.spot_requests) == 2
    assert {m.spot_request for m in found.instances} == {r.id for r in found.spot_requests}


def test_a_price_that_is_too_low_is_refused_with_the_way_out(park_cloud: ParkCloud) -> None:
    park_cloud.faults("[spot]\nusd_per_hour = 2.5\n")

    with pytest.raises(NoCapacityError, match="SpotMaxPriceTooLow") as caught:
        park_cloud.up(nodes=2, spot=True, max_price=1.0)
    assert "--max-price" in str(caught.value)
    assert park_cloud.found("instances").instances == ()


def test_a_head_alone_moves_with_all_to_where_there_is_room(park_cloud: ParkCloud) -> None:
    first = park_cloud.first_zone()
    park_cloud.faults(f'[[capacity]]\nzone = "{first}"\nfree = 1\n')

    park_cloud.up(nodes=3)

    cluster = park_cloud.cluster()
    assert cluster.is_whole
    assert len(cluster.nodes) == 3
    assert first not in zones(park_cloud)
    found = park_cloud.found()
    assert len(found.instances) == 3, "the first head is still there"
    assert park_cloud.steps.count("install.sh") == 1, "the image has the software already"


def test_where_nowhere_is_room_all_that_was_tried_is_listed(park_cloud: ParkCloud) -> None:
    park_cloud.faults(no_room())

    with pytest.raises(NoCapacityError) as caught:
        park_cloud.up(nodes=2, instance_types=("r7iz.metal-16xl", "m7i.metal-24xl"))
    tried = re.findall(r"^  (\S+) in (\S+?)(,|:)", caught.value.message, re.MULTILINE)
    assert {kind for kind, _, _ in tried} == {"r7iz.metal-16xl", "m7i.metal-24xl"}
    assert len(tried) == len(park_cloud.recorder.of("RunInstances"))
    assert park_cloud.found("instances").instances == ()
    park_cloud.down()
    assert park_cloud.left() == []


def test_a_cluster_that_works_never_moves_for_a_new_node(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=2)
    (zone,) = zones(park_cloud)
    park_cloud.faults(f'[[capacity]]\nzone = "{zone}"\nfree = 2\n')

    with pytest.raises(NoCapacityError):
        park_cloud.up(nodes=3)
    assert len(park_cloud.cluster().nodes) == 2
    assert zones(park_cloud) == {zone}


def test_the_quota_is_told_with_its_code(park_cloud: ParkCloud) -> None:
    park_cloud.faults("[quota]\non_demand_vcpus = 64\n")

    with pytest.raises(NoCapacityError, match="current vCPU limit of 64") as caught:
        park_cloud.up(nodes=2)
    assert "L-1216C47A" in str(caught.value)


def test_a_head_that_may_hold_results_does_not_give_way_to_a_larger_cluster(
    park_cloud: ParkCloud,
) -> None:
    head = park_cloud.made(nodes=1).head.instance
    park_cloud.faults(f'[[capacity]]\nzone = "{head.zone}"\nfree = 1\n')

    with pytest.raises(NoCapacityError):
        park_cloud.up(nodes=3)
    assert park_cloud.found("instances").ids()["instances"] == [head.id]
