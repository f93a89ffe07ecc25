"""An `up` whose machines are terminated while it waits for them: by a `down` elsewhere, or alone."""

from __future__ import annotations

import pytest

from infra.errors import SprError
from infra.local.api.lifecycle import set_reason
from tests.harness.simulated_cloud import SimulatedCloud

SPOT = "Server.SpotInstanceTermination"


def end_while_waiting(
    cloud: SimulatedCloud, action: str, count: int | None = None, reason: str = ""
) -> None:
    """Terminate the first machines, or all, after a call with which `up` waits, as `down` begins to.

    A ``reason`` makes them end by themselves.
    """

    def act(name: str, moment: str) -> None:
        found = [i for i in cloud.fake.backend.all_instances() if i.state != "terminated"]
        if (name, moment) == (action, "after") and found:
            cloud.fake.application.on_call = None
            cloud.fake.backend.terminate_instances([i.id for i in found][:count])
            for machine in found[:count] if reason else ():
                set_reason(machine, reason, "ended by EC2")

    cloud.fake.application.on_call = act


@pytest.mark.parametrize(
    ("faults", "waits_with"),
    [
        ('[[machine]]\nfate = "no-ssh"\n', "DescribeInstanceStatus"),
        ('[[machine]]\nfate = "never-boots"\n', "DescribeInstances"),
        ('terminate_s = 600\n[[machine]]\nfate = "no-ssh"\n', "DescribeInstanceStatus"),
        ("", "CreateTags"),
    ],
    ids=["ssh", "boot", "slow end", "installed"],
)
def test_up_ends_soon_and_buys_nothing_where_a_down_terminates_its_machines(
    cloud: SimulatedCloud, faults: str, waits_with: str
) -> None:
    cloud.faults(faults.replace("[[machine]]", '[[machine]]\nn = "*"'))
    bought: list[float] = []

    def note_purchase(name: str, moment: str) -> None:
        if (name, moment) == ("RunInstances", "after"):
            bought.append(cloud.clock.now)
            end_while_waiting(cloud, waits_with)

    cloud.fake.application.on_call = note_purchase

    with pytest.raises(SprError, match=r"was removed in the meantime: .* terminated i-") as caught:
        cloud.up(nodes=2)
    assert "spr-cluster up --name bert" in str(caught.value)
    assert len(cloud.purchases()) == 1
    assert cloud.clock.now - bought[0] < 200


def test_a_machine_that_ends_by_itself_is_replaced_within_minutes(cloud: SimulatedCloud) -> None:
    cloud.faults('[[machine]]\nn = 0\nfate = "no-ssh"\n')
    end_while_waiting(cloud, "DescribeInstanceStatus", 1, SPOT)

    cloud.up(nodes=1)

    notes = cloud.progress.notes
    assert sum(note.startswith("bought: ") for note in notes) == 2
    assert cloud.clock.now - cloud.began < 300
    assert cloud.cluster().is_whole


def test_a_worker_that_is_terminated_alone_is_replaced_within_minutes(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=2)
    worker = cloud.cluster().workers[0].instance.id
    cloud.break_ssh(worker)
    began = cloud.clock.now

    def act(name: str, moment: str) -> None:
        if (name, moment) == ("DescribeInstanceStatus", "after"):
            cloud.fake.application.on_call = None
            cloud.fake.backend.terminate_instances([worker])

    plan_input = cloud.plan_input(nodes=3)
    cloud.fake.application.on_call = act
    cloud.apply(plan_input)

    assert cloud.cluster().is_whole
    assert cloud.clock.now - began < 300


def test_the_wait_asks_ec2_twice_a_minute_however_many_nodes_it_waits_for(
    cloud: SimulatedCloud,
) -> None:
    cloud.be("instant")
    cloud.prepared(nodes=1)
    cloud.faults('[[machine]]\nn = "*"\nfate = "no-ssh"\n')
    before = len(cloud.recorder.operations())
    end_while_waiting(cloud, "DescribeInstanceStatus")
    began = cloud.clock.now

    with pytest.raises(SprError, match="removed in the meantime"):
        cloud.up(nodes=8)
    calls = cloud.recorder.operations()[before:]
    waited = calls[calls.index("RunInstances") + 1 :]
    minutes = (cloud.clock.now - began) / 60
    assert waited.count("DescribeInstanceStatus") <= minutes + 1
    assert waited.count("DescribeInstances") <= minutes + 4
