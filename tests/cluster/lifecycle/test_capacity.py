"""Zones, types and markets without room: what is bought instead, and where nothing can be."""

from __future__ import annotations

import pytest

from infra.ec2.purchase import NoCapacityError
from infra.errors import CloudError
from tests.harness.simulated_cloud import SimulatedCloud


def zones(cloud: SimulatedCloud) -> set[str]:
    return {node.instance.zone for node in cloud.cluster().nodes}


@pytest.mark.parametrize("rule", ["[[capacity]]\nfree = 0", '[[machine]]\nfate = "no-room"'])
def test_a_zone_without_room_is_passed_over(cloud: SimulatedCloud, rule: str) -> None:
    """Whether EC2 refuses the purchase or ends the machines after it."""
    first = cloud.first_zone()
    cloud.faults(f'{rule}\nzone = "{first}"\n')

    cloud.up(nodes=3)

    assert len(zones(cloud)) == 1
    assert zones(cloud) != {first}
    assert any(f"in {first}" in note for note in cloud.progress.notes)
    refused = [event for event in cloud.ctx.events.read() if event["event"] == "refused"]
    assert all(first in event["what"] for event in refused)
    assert refused[0]["reason"].startswith("InsufficientInstanceCapacity: ")
    ran = {event["ran"] for event in cloud.ctx.events.read() if event["event"] == "faulty"}
    assert ran == ({False} if "no-room" in rule else set()), "their cost is counted"


def test_disks_beyond_the_quota_for_storage_are_not_bought_again(cloud: SimulatedCloud) -> None:
    cloud.faults('[[machine]]\nn = 2\nfate = "no-storage"\n')

    with pytest.raises(CloudError, match="exceeds the account's quota") as caught:
        cloud.up(nodes=3)

    assert "L-7A658B76" in str(caught.value.hint)
    assert len(cloud.purchases()) == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_head_alone_moves_with_all_to_where_there_is_room(
    cloud: SimulatedCloud, late: bool
) -> None:
    first = cloud.first_zone()
    full = f'[[capacity]]\nzone = "{first}"\nfree = 1\n'
    if late:  # the two workers, in the placement group and without it
        full = "".join(f'[[machine]]\nn = {n}\nfate = "no-room"\n' for n in range(1, 5))
    dies = "".join(f'[[machine]]\nn = {n}\nfate = "dies"\n' for n in ((6, 8) if late else (2, 4)))
    cloud.faults(f"terminate_s = 1500\n{full}{dies}")
    cloud.clock.pace = 20

    cloud.up(nodes=3)  # a move is no replacement

    cluster = cloud.cluster()
    assert cluster.is_whole
    assert len(cluster.nodes) == 3
    assert first not in zones(cloud)
    found = cloud.found("instances")
    assert len(found.alive) == 3, "the first head is still there"
    moved = cloud.purchases()[-1]
    assert "Placement" in moved, "the first head held the placement group"
    assert cloud.steps.count("install.sh") == 1, "the image has the software already"


def test_a_head_that_may_hold_results_does_not_give_way_to_a_larger_cluster(
    cloud: SimulatedCloud,
) -> None:
    head = cloud.prepared(nodes=1).head.instance
    cloud.faults(f'[[capacity]]\nzone = "{head.zone}"\nfree = 1\n')

    with pytest.raises(NoCapacityError):
        cloud.up(nodes=3)
    assert cloud.found("instances").ids()["instances"] == [head.id]
