"""``up --wait-for-capacity``: all machines or none, tried again until there is room or time is over."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from cluster.cli.capacity import CapacityWait, bring_up_when_possible
from cluster.cli.proposal import Proposal, propose
from cluster.lifecycle.prepare import find_offers
from cluster.lifecycle.reconcile import bring_up
from cluster.nodes import Cluster
from infra.ec2.purchase import NoCapacityError
from tests.harness.simulated_cloud import SimulatedCloud

_NO_ROOM = "[[capacity]]\nfree = {}\n"
# As if the machines that shut down had the subnet's addresses.
_HELD = """terminate_s = 80000
[[error]]
action = "RunInstances"
code = "InsufficientFreeAddressesInSubnet"
times = 999
"""


def plan(cloud: SimulatedCloud, **given: Any) -> Proposal:
    return propose(cloud.ctx, cloud.plan_input(nodes=2, **given))


def bring(cloud: SimulatedCloud, before: Callable[[int], None]) -> Callable[[Proposal], Cluster]:
    """Return a function that applies a plan; ``before`` gets the number of the try."""
    tries = iter(range(1000))

    def apply(proposal: Proposal) -> Cluster:
        before(next(tries))
        offers = find_offers(cloud.ctx, proposal.plan_input)
        return bring_up(cloud.ctx, proposal.plan_input, proposal.plan, lambda: offers)

    return apply


def in_first_zone(cloud: SimulatedCloud) -> dict[str, Any]:
    """The options by which machines are bought in one zone only."""
    zone = [{"Name": "availability-zone", "Values": [cloud.first_zone()]}]
    (subnet,) = cloud.ec2.describe_subnets(Filters=zone)["Subnets"]
    return {"subnet_ids": (subnet["SubnetId"],)}


@pytest.mark.parametrize("free", [0, 1])
def test_it_buys_when_there_is_room_and_keeps_nothing_until_then(
    cloud: SimulatedCloud, free: int
) -> None:
    alive = []
    slow = "terminate_s = 1500\n"  # as bare metal
    cloud.faults(slow + _NO_ROOM.format(free))
    # A head that can't move to another zone is terminated.
    given = in_first_zone(cloud)

    def before(number: int) -> None:
        alive.append(len(cloud.found("instances").alive))
        if number == 2:
            cloud.faults(slow)

    begun = cloud.clock.monotonic()
    wait = CapacityWait(timedelta(hours=2), lambda: plan(cloud, **given))
    cluster = bring_up_when_possible(plan(cloud, **given), wait, bring(cloud, before))

    assert len(cluster.nodes) == 2
    assert alive == [0] * 3
    assert 2 * 20 < cloud.clock.monotonic() - begun < 20 * 60
    # The machines live for the whole time, whenever they were bought.
    record = cloud.found().record
    assert record
    assert record.expires - cloud.ctx.now() > timedelta(hours=7, minutes=30)


@pytest.mark.parametrize(
    ("kept", "free", "moves", "tries"),
    [(0, 0, False, [0, 1, 2]), (0, 1, False, [0]), (0, 1, True, [0]), (1, 0, False, [0, 1, 2])],
)
def test_a_try_that_costs_money_does_not_restart_the_budget(
    cloud: SimulatedCloud, kept: int, free: int, moves: bool, tries: list[int]
) -> None:
    given = {**({} if moves else in_first_zone(cloud)), "budget": 500.0}
    begun = list[int]()

    def before(number: int) -> None:
        begun.append(number)
        if kept:  # its cluster exists, so that no try restarts the budget
            cloud.ctx.events.record("bought", "a faulty machine", resources=[f"i-{number}"])

    if kept:
        cloud.up(**{**given, "nodes": kept})
    cloud.faults(_NO_ROOM.format(free))
    wait = CapacityWait(timedelta(minutes=2), lambda: plan(cloud, **given))

    with pytest.raises(NoCapacityError) as caught:
        bring_up_when_possible(plan(cloud, **given), wait, bring(cloud, before))

    assert begun[:3] == tries
    assert ("this try spent part of --budget" in str(caught.value.hint)) is bool(free)
    assert len(cloud.found("instances").alive) == kept


def test_when_the_time_is_over_nothing_is_left_running(cloud: SimulatedCloud) -> None:
    old = [node.instance.id for node in cloud.prepared(nodes=2).nodes]
    cloud.faults(_HELD)
    cloud.ec2.terminate_instances(InstanceIds=old)
    cloud.clock.pace = 3
    begun = cloud.clock.monotonic()
    wait = CapacityWait(timedelta(minutes=3), lambda: plan(cloud))

    with pytest.raises(NoCapacityError) as caught:
        bring_up_when_possible(plan(cloud), wait, bring(cloud, lambda _: None))

    assert "waited " in str(caught.value.hint)
    assert 3 * 60 <= cloud.clock.monotonic() - begun < 12 * 60
    assert not cloud.found("instances").alive


def test_the_time_also_ends_while_this_machine_sleeps(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.faults(_NO_ROOM.format(0))
    clock, asleep, tries = cloud.clock, [0.0], list[int]()
    sleep = clock.sleep

    def fall_asleep(seconds: float) -> None:
        sleep(seconds)
        if tries:
            clock.now += 36_000
            asleep[0] += 36_000

    monkeypatch.setattr(clock, "sleep", fall_asleep)
    monkeypatch.setattr(clock, "monotonic", lambda: clock.now - asleep[0])
    wait = CapacityWait(timedelta(hours=2), lambda: plan(cloud))

    with pytest.raises(NoCapacityError, match="waited 10"):
        bring_up_when_possible(plan(cloud), wait, bring(cloud, tries.append))

    assert tries == [0]


def test_it_does_not_wait_for_a_quota(cloud: SimulatedCloud) -> None:
    cloud.faults("[quota]\non_demand_vcpus = 64\n")
    begun = cloud.clock.monotonic()
    wait = CapacityWait(timedelta(hours=1), lambda: plan(cloud))

    with pytest.raises(NoCapacityError, match="current vCPU limit"):
        bring_up_when_possible(plan(cloud), wait, bring(cloud, lambda _: None))

    assert cloud.clock.monotonic() - begun < 60
