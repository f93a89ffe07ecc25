"""Machines that never boot, die, do not answer, or are not what they should be: replaced, or named."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.lifecycle import reach
from infra.errors import SprError
from tests.harness.simulated_cloud import SimulatedCloud


def fate(n: int | str, fate: str, **more: Any) -> str:
    """A faults file's rule about the n-th machine."""
    number = n if isinstance(n, int) else f'"{n}"'
    values = "".join(f"{key} = {value}\n" for key, value in more.items())
    return f'[[machine]]\nn = {number}\nfate = "{fate}"\n{values}'


@pytest.mark.parametrize(
    ("number", "kind"),
    [(2, "never-boots"), (2, "dies"), (2, "no-ssh"), (2, "no-amx"), (0, "dies"), (0, "stops")],
)
def test_a_machine_that_does_not_work_is_replaced(
    cloud: SimulatedCloud, number: int, kind: str
) -> None:
    cloud.faults(f'profile = "metal"\n{fate(number, kind)}')
    cloud.clock.pace = 60

    cluster = cloud.up(nodes=3)

    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert cloud.cluster().is_whole
    cloud.clock.sleep(60)
    found = cloud.found("instances")
    assert len(found.instances) == 3, "the machine that does not work still costs money"
    bought = [request["MinCount"] for request in cloud.purchases()]
    assert bought == ([1, 2, 1] if number else [1, 1, 2])
    waits = [n for n in cloud.progress.notes if n.startswith("waiting for SSH on node2: ")]
    if kind == "no-ssh":
        assert "0 min of at most 40" in waits[0]
        assert "EC2's status checks: ok; " in waits[-1]
        assert "connection refused" in waits[-1]


@pytest.mark.parametrize("second", ["", "no-guest"])
def test_a_first_machine_without_ssh_is_replaced_if_another_answers_or_boots(
    cloud: SimulatedCloud, second: str
) -> None:
    rules = fate(0, "no-ssh") + (fate(1, second) if second else "")
    cloud.faults(f'profile = "metal"\n{rules}')
    cloud.clock.pace = 60

    cloud.up(nodes=2, bake="none")

    assert cloud.cluster().is_whole
    bought = [request["MinCount"] for request in cloud.purchases()]
    assert bought == [2, 2 if second else 1]


@pytest.mark.parametrize("reports", [True, False])
def test_a_machine_that_never_boots_counts_when_it_is_given_up_and_before_it_reports(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    nodes = cloud.prepared(nodes=2).nodes
    status = dict(zip((node.instance.id for node in nodes), ("ok", "initializing"), strict=True))
    found = {
        id_: {"InstanceId": id_, "InstanceStatus": {"Status": word}} for id_, word in status.items()
    }

    def answer(**asked: list[str]) -> Any:
        return {"InstanceStatuses": [found[id_] for id_ in asked["InstanceIds"]]}

    clients: Any = SimpleNamespace(ec2=SimpleNamespace(describe_instance_status=answer))
    monkeypatch.setattr(reach, "describe_by_id", lambda *_: [])
    unused: Any = None
    stragglers = reach._Stragglers(replace(cloud.ctx, clients=clients), nodes, unused, None)

    if reports:
        stragglers.report(nodes[1], 0, "no answer")
        stragglers.done(nodes[1])
    for _ in range(10):
        cloud.clock.sleep(60)
        stragglers.report(nodes[0], 0, "no answer")

    assert not stragglers.find_cut_off()


def test_where_no_machine_works_it_ends_clearly_and_soon(cloud: SimulatedCloud) -> None:
    cloud.faults(fate("*", "never-boots"))
    cloud.clock.pace = 60

    with pytest.raises(SprError, match="the cluster did not come up: node0") as caught:
        cloud.up(nodes=2)
    assert "another --instance-type or --region" in str(caught.value)
    assert sum(note.startswith("bought: ") for note in cloud.progress.notes) <= 4
    assert cloud.clock.now - cloud.began < 4 * 3600
    cloud.down()
    assert cloud.left() == []


def test_a_head_that_stops_while_a_worker_is_replaced_is_not_thrown_away(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=2)
    head, worker = (node.instance.id for node in cloud.cluster().nodes)
    cloud.break_ssh(worker)
    cloud.clock.pace = 60
    plan_input = cloud.plan_input(nodes=3)
    answered = threading.Event()
    cloud.steps.after["# querying the facts"] = answered.set

    def stop_head(action: str, moment: str) -> None:
        # Asked while the worker is waited for; the head, in a thread of its own, has to answer first.
        if (action, moment) == ("DescribeInstanceStatus", "after") and answered.wait(10):
            cloud.fake.backend.stop_instances([head])

    cloud.fake.application.on_call = stop_head
    with pytest.raises(SprError, match=f"head node {head} is stopped"):
        cloud.apply(plan_input)
    assert head in cloud.found("instances").ids()["instances"]
