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
    simulated_cloud: SimulatedCloud, faults: str, waits_with: str
) -> None:
    simulated_cloud.faults(faults.replace("[[machine]]", '[[machine]]\nn = "*"'))
    bought: list[float] = []

    def note_purchase(name: str, moment: str) -> None:
        if (name, moment) == ("RunInstances", "after"):
            bought.append(simulated_cloud.clock.now)
            end_while_waiting(simulated_cloud, waits_with)

    simulated_cloud.fake.application.on_call = note_purchase

    with pytest.raises(SprError, match=r"was removed in the meantime: .* terminated i-") as caught:
        simulated_cloud.up(nodes=2)
    assert "spr-cluster up --name bert" in str(caught.value)
    assert len(simulated_cloud.purchases()) == 1
    assert simulated_cloud.clock.now - bought[0] < 200


def test_a_machine_that_ends_by_itself_is_replaced_within_minutes(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults('[[machine]]\nn = 0\nfate = "no-ssh"\n')
    end_while_waiting(simulated_cloud, "DescribeInstanceStatus", 1, SPOT)

    simulated_cloud.up(nodes=1)

    notes = simulated_cloud.progress.notes
    assert sum(note.startswith("bought: ") for note in notes) == 2
    assert simulated_cloud.clock.now - simulated_cloud.began < 300
    assert simulated_cloud.cluster().is_whole


def test_a_worker_that_is_terminated_alone_is_replaced_within_minutes(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=2)
    worker = simulated_cloud.cluster().workers[0].instance.id
    simulated_cloud.break_ssh(worker)
    began = simulated_cloud.clock.now

    def act(name: str, moment: str) -> None:
        if (name, moment) == ("DescribeInstanceStatus", "after"):
            simulated_cloud.fake.application.on_call = None
            simulated_cloud.fake.backend.terminate_instances([worker])

    plan_input = simulated_cloud.plan_input(nodes=3)
    simulated_cloud.fake.application.on_call = act
    simulated_cloud.apply(plan_input)

    assert simulated_cloud.cluster().is_whole
    assert simulated_cloud.clock.now - began < 300


def test_the_wait_asks_ec2_twice_a_minute_however_many_nodes_it_waits_for(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.be("instant")
    simulated_cloud.prepared(nodes=1)
    simulated_cloud.faults('[[machine]]\nn = "*"\nfate = "no-ssh"\n')
    before = len(simulated_cloud.recorder.operations())
    end_while_waiting(simulated_cloud, "DescribeInstanceStatus")
    began = simulated_cloud.clock.now

    with pytest.raises(SprError, match="removed in the meantime"):
        simulated_cloud.up(nodes=20)
    calls = simulated_cloud.recorder.operations()[before:]
    waited = calls[calls.index("RunInstances") + 1 :]
    minutes = (simulated_cloud.clock.now - began) / 60
    assert waited.count("DescribeInstanceStatus") <= minutes + 1
    assert waited.count("DescribeInstances") <= minutes + 4
