"""Machines that never boot, die, do not answer, or are not what they should be: replaced, or named."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from infra.errors import HostError, SprError
from tests.harness.simulated_cloud import ParkCloud


def fate(n: int | str, fate: str, **more: Any) -> str:
    """A faults file's rule about the n-th machine."""
    number = n if isinstance(n, int) else f'"{n}"'
    values = "".join(f"{key} = {value}\n" for key, value in more.items())
    return f'[[machine]]\nn = {number}\nfate = "{fate}"\n{values}'


@pytest.mark.parametrize("kind", ["never-boots", "dies", "no-ssh", "no-amx"])
def test_a_worker_that_does_not_work_is_replaced(park_cloud: ParkCloud, kind: str) -> None:
    park_cloud.faults(f'profile = "metal"\n{fate(2, kind)}')
    park_cloud.clock.pace = 60

    cluster = park_cloud.up(nodes=3)

    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert park_cloud.cluster().is_whole
    park_cloud.clock.sleep(60)
    found = park_cloud.found()
    assert len(found.instances) == 3, "the machine that does not work still costs money"
    bought = [request["MinCount"] for request in park_cloud.recorder.of("RunInstances")]
    assert bought == [1, 2, 1]


@pytest.mark.parametrize("kind", ["never-boots", "dies", "no-ssh"])
def test_a_head_that_does_not_come_up_is_replaced(park_cloud: ParkCloud, kind: str) -> None:
    park_cloud.faults(f'profile = "metal"\n{fate(0, kind)}')
    park_cloud.clock.pace = 60

    park_cloud.up(nodes=2)

    assert park_cloud.cluster().is_whole
    park_cloud.clock.sleep(60)
    assert len(park_cloud.found("instances").instances) == 2


@pytest.mark.parametrize("kind", ["never-boots", "dies", "no-ssh"])
def test_where_no_machine_works_it_ends_clearly_and_soon(park_cloud: ParkCloud, kind: str) -> None:
    park_cloud.faults(fate("*", kind))
    park_cloud.clock.pace = 60

    with pytest.raises(SprError, match="the cluster did not come up: node0") as caught:
        park_cloud.up(nodes=2)
    assert "another --instance-type or --region" in str(caught.value)
    assert sum(note.startswith("bought: ") for note in park_cloud.notes.told) <= 4
    assert park_cloud.clock.now - park_cloud.began < 4 * 3600
    park_cloud.down()
    assert park_cloud.left() == []


def test_while_it_is_waited_it_is_said_for_whom_and_what_ec2_says(park_cloud: ParkCloud) -> None:
    park_cloud.faults(fate(1, "no-ssh"))
    park_cloud.clock.pace = 5

    park_cloud.up(nodes=2)

    told = [note for note in park_cloud.notes.told if note.startswith("waiting for SSH on node1: ")]
    assert "0 min of at most 40" in told[0]
    assert "EC2's status checks: ok; " in told[-1]
    assert "connection refused" in told[-1]


def test_an_odd_worker_that_lacks_amx_again_and_again_is_named(park_cloud: ParkCloud) -> None:
    park_cloud.faults("".join(fate(n, "no-amx") for n in range(1, 9)))

    with pytest.raises(SprError, match=r"node1 \(i-\w+\): no AMX: lacks amx_bf16"):
        park_cloud.up(nodes=2)


def test_a_head_that_stops_by_itself_is_made_anew(park_cloud: ParkCloud) -> None:
    park_cloud.faults(fate(0, "stops"))

    park_cloud.up(nodes=2)

    assert park_cloud.cluster().is_whole
    assert len(park_cloud.found("instances").instances) == 2


def test_an_image_that_ec2_gives_up_is_an_error_and_the_next_up_makes_another(
    park_cloud: ParkCloud,
) -> None:
    park_cloud.engine.refuse = "copy"
    with pytest.raises(SprError, match=r"image ami-\w+ failed: .*refused"):
        park_cloud.up(nodes=2)
    park_cloud.engine.refuse = ""

    park_cloud.up(nodes=2)

    assert park_cloud.cluster().is_whole
    assert len(park_cloud.found("images").images) == 1


def test_a_worker_that_never_answers_does_not_hold_a_head_that_lost_its_way(
    park_cloud: ParkCloud,
) -> None:
    """The head of a connected cluster may hold results: it is never thrown away."""
    park_cloud.made(nodes=2)
    head = park_cloud.cluster().head.instance.id
    park_cloud.break_ssh(head)
    park_cloud.clock.pace = 60

    with pytest.raises(HostError, match=f"the head {head} does not answer") as caught:
        park_cloud.up(nodes=3)
    assert f"aws ec2 terminate-instances --instance-ids {head}" in str(caught.value)
    assert head in park_cloud.found("instances").ids()["instances"]


def test_a_head_that_stops_while_a_worker_is_replaced_is_not_thrown_away(
    park_cloud: ParkCloud,
) -> None:
    park_cloud.made(nodes=2)
    head, worker = (node.instance.id for node in park_cloud.cluster().nodes)
    park_cloud.break_ssh(worker)
    park_cloud.clock.pace = 60
    plan_input = park_cloud.plan_input(nodes=3)
    answering = threading.Event()
    park_cloud.steps.before["spr-cluster: hostname"] = answering.set

    def stop_head(action: str, moment: str) -> None:
        # Asked while the worker is waited for; the head, in a thread of its own, has to answer first.
        if (action, moment) == ("DescribeInstanceStatus", "after") and answering.wait(10):
            park_cloud.fake.backend.stop_instances([head])

    park_cloud.fake.application.on_call = stop_head
    with pytest.raises(SprError, match=f"head node {head} is stopped"):
        park_cloud.apply(plan_input)
    assert head in park_cloud.found("instances").ids()["instances"]
