"""Machines that never boot, die, do not answer, or are not what they should be: replaced, or named."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from infra.errors import HostError, SprError
from tests.harness.simulated_cloud import SimulatedCloud


def fate(n: int | str, fate: str, **more: Any) -> str:
    """A faults file's rule about the n-th machine."""
    number = n if isinstance(n, int) else f'"{n}"'
    values = "".join(f"{key} = {value}\n" for key, value in more.items())
    return f'[[machine]]\nn = {number}\nfate = "{fate}"\n{values}'


@pytest.mark.parametrize("kind", ["never-boots", "dies", "no-ssh", "no-amx"])
def test_a_worker_that_does_not_work_is_replaced(
    simulated_cloud: SimulatedCloud, kind: str
) -> None:
    simulated_cloud.faults(f'profile = "metal"\n{fate(2, kind)}')
    simulated_cloud.clock.pace = 60

    cluster = simulated_cloud.up(nodes=3)

    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert simulated_cloud.cluster().is_whole
    simulated_cloud.clock.sleep(60)
    found = simulated_cloud.found()
    assert len(found.instances) == 3, "the machine that does not work still costs money"
    bought = [request["MinCount"] for request in simulated_cloud.purchases()]
    assert bought == [1, 2, 1]


@pytest.mark.parametrize("kind", ["never-boots", "dies"])
def test_a_head_that_does_not_come_up_is_replaced(
    simulated_cloud: SimulatedCloud, kind: str
) -> None:
    simulated_cloud.faults(f'profile = "metal"\n{fate(0, kind)}')
    simulated_cloud.clock.pace = 60

    simulated_cloud.up(nodes=2)

    assert simulated_cloud.cluster().is_whole
    simulated_cloud.clock.sleep(60)
    assert len(simulated_cloud.found("instances").instances) == 2


@pytest.mark.parametrize("second", ["", "no-guest"])
def test_a_first_machine_without_ssh_is_replaced_if_another_answers_or_boots(
    simulated_cloud: SimulatedCloud, second: str
) -> None:
    rules = fate(0, "no-ssh") + (fate(1, second) if second else "")
    simulated_cloud.faults(f'profile = "metal"\n{rules}')
    simulated_cloud.clock.pace = 60

    simulated_cloud.up(nodes=2, bake="none")

    assert simulated_cloud.cluster().is_whole
    bought = [request["MinCount"] for request in simulated_cloud.purchases()]
    assert bought == [2, 2 if second else 1]


@pytest.mark.parametrize("kind", ["never-boots", "dies"])
def test_where_no_machine_works_it_ends_clearly_and_soon(
    simulated_cloud: SimulatedCloud, kind: str
) -> None:
    simulated_cloud.faults(fate("*", kind))
    simulated_cloud.clock.pace = 60

    with pytest.raises(SprError, match="the cluster did not come up: node0") as caught:
        simulated_cloud.up(nodes=2)
    assert "another --instance-type or --region" in str(caught.value)
    assert sum(note.startswith("bought: ") for note in simulated_cloud.progress.notes) <= 4
    assert simulated_cloud.clock.now - simulated_cloud.began < 4 * 3600
    simulated_cloud.down()
    assert simulated_cloud.left() == []


def test_while_waiting_the_nodes_and_ec2s_status_are_shown(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults(fate(1, "no-ssh"))
    simulated_cloud.clock.pace = 5

    simulated_cloud.up(nodes=2)

    result = [
        note
        for note in simulated_cloud.progress.notes
        if note.startswith("waiting for SSH on node1: ")
    ]
    assert "0 min of at most 40" in result[0]
    assert "EC2's status checks: ok; " in result[-1]
    assert "connection refused" in result[-1]


def test_an_odd_worker_that_lacks_amx_again_and_again_is_named(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults("".join(fate(n, "no-amx") for n in range(1, 9)))

    with pytest.raises(SprError, match=r"node1 \(i-\w+\): no AMX: lacks amx_bf16"):
        simulated_cloud.up(nodes=2)


def test_a_head_that_stops_is_replaced(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.faults(fate(0, "stops"))

    simulated_cloud.up(nodes=2)

    assert simulated_cloud.cluster().is_whole
    assert len(simulated_cloud.found("instances").instances) == 2


def test_an_image_that_ec2_gives_up_is_an_error_and_the_next_up_makes_another(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.engine.refuse = "copy"
    with pytest.raises(SprError, match=r"image ami-\w+ failed: .*refused"):
        simulated_cloud.up(nodes=2)
    simulated_cloud.engine.refuse = ""

    simulated_cloud.up(nodes=2)

    assert simulated_cloud.cluster().is_whole
    assert len(simulated_cloud.found("images").images) == 1


def test_a_worker_that_never_answers_does_not_hold_a_head_that_lost_its_way(
    simulated_cloud: SimulatedCloud,
) -> None:
    """The head of a connected cluster may hold results: it is never thrown away."""
    simulated_cloud.prepared(nodes=2)
    head = simulated_cloud.cluster().head.instance.id
    simulated_cloud.break_ssh(head)
    simulated_cloud.clock.pace = 60

    with pytest.raises(HostError, match=f"the head {head} does not answer") as caught:
        simulated_cloud.up(nodes=3)
    assert f"aws ec2 terminate-instances --region us-east-1 --instance-ids {head}" in str(
        caught.value
    )
    assert head in simulated_cloud.found("instances").ids()["instances"]


def test_a_head_that_stops_while_a_worker_is_replaced_is_not_thrown_away(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=2)
    head, worker = (node.instance.id for node in simulated_cloud.cluster().nodes)
    simulated_cloud.break_ssh(worker)
    simulated_cloud.clock.pace = 60
    plan_input = simulated_cloud.plan_input(nodes=3)
    answering = threading.Event()
    simulated_cloud.steps.before["# querying the facts"] = answering.set

    def stop_head(action: str, moment: str) -> None:
        # Asked while the worker is waited for; the head, in a thread of its own, has to answer first.
        if (action, moment) == ("DescribeInstanceStatus", "after") and answering.wait(10):
            simulated_cloud.fake.backend.stop_instances([head])

    simulated_cloud.fake.application.on_call = stop_head
    with pytest.raises(SprError, match=f"head node {head} is stopped"):
        simulated_cloud.apply(plan_input)
    assert head in simulated_cloud.found("instances").ids()["instances"]
