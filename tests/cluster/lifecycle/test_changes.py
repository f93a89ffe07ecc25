"""A cluster that exists: it grows, shrinks, is repaired, and keeps what it was created with."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from infra.ec2 import tags
from infra.ec2.purchase import NoCapacityError
from infra.errors import UsageError
from infra.plan.actions import ActionKind, Plan
from tests.harness.simulated_cloud import SimulatedCloud

HOUR = timedelta(hours=1)


def ids(cloud: SimulatedCloud) -> list[str]:
    """The nodes in the order of their ranks."""
    return [node.instance.id for node in cloud.cluster().nodes]


def assert_whole(cloud: SimulatedCloud, nodes: int) -> None:
    """So many connected nodes, and no machine besides; every one knows every other."""
    cluster = cloud.cluster()
    assert cluster.is_whole
    assert len(cluster.nodes) == nodes
    assert len(cloud.found("instances").alive) == nodes
    names = {node.name: node.private_ip for node in cluster.nodes}
    machines = [cloud.machine(id_) for id_ in ids(cloud)]
    assert all(machine["names"] == names for machine in machines)
    assert len({machine["mesh"] for machine in machines}) == 1
    assert not cloud.plan().changes


def test_it_grows_and_shrinks_and_the_others_keep_their_ranks(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2)
    before = ids(cloud)

    cloud.up(nodes=4)

    assert_whole(cloud, 4)
    grown = ids(cloud)
    assert grown[:2] == before
    assert len(cloud.found("images").images) == 1
    assert cloud.steps.count("install.sh") == 1
    cloud.up(nodes=3)
    assert_whole(cloud, 3)
    assert ids(cloud) == grown[:3]


# Mending


def impair_worker(cloud: SimulatedCloud) -> str:
    lost = ids(cloud)[1]
    cloud.fake.backend.lifecycle.impaired.add(lost)
    # Before, it could be booting.
    cloud.clock.now += 2400
    return lost


def cut_off_worker(cloud: SimulatedCloud) -> str:
    lost = ids(cloud)[1]
    cloud.break_ssh(lost)
    cloud.clock.pace = 20
    return lost


@pytest.mark.parametrize("harm", [impair_worker, cut_off_worker])
def test_a_worker_that_fails_is_replaced(
    cloud: SimulatedCloud, harm: Callable[[SimulatedCloud], str]
) -> None:
    cloud.prepared(nodes=3)
    head, _, last = ids(cloud)
    lost = harm(cloud)

    cloud.up()

    assert_whole(cloud, 3)
    found = cloud.cluster().nodes
    assert [node.name for node in found] == ["node0", "node1", "node2"]
    assert [found[0].instance.id, found[2].instance.id] == [head, last]
    assert lost not in cloud.found("instances").ids()["instances"]


def test_the_next_node_replaces_a_missing_head(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=3)
    head, second, third = ids(cloud)
    cloud.end(head)
    with pytest.raises(UsageError, match="cluster 'bert' has no running head node"):
        cloud.cluster()

    cloud.up()

    assert_whole(cloud, 3)
    assert {node.name: node.instance.id for node in cloud.cluster().nodes}.items() >= {
        "node0": second,
        "node2": third,
    }.items()
    names = {machine.tags["Name"] for machine in cloud.found("instances").instances}
    assert names == {"bert-head", "bert-worker"}
    assert cloud.steps.count("install.sh") == 1


# What is shown is what is done


def test_a_machine_that_ends_after_the_plan_leads_to_a_new_one_that_is_reported(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=3)
    plan_input = cloud.plan_input(nodes=4)
    lost = ids(cloud)[1]
    cloud.end(lost)
    told: list[tuple[Plan, str]] = []

    cloud.apply(plan_input, lambda _, plan, reason: told.append((plan, reason)))

    assert_whole(cloud, 4)
    assert lost not in ids(cloud)
    ((plan, reason),) = told
    assert f"({lost}): shutting-down" in reason
    assert ActionKind.RUN_WORKERS in {action.kind for action in plan.actions}


def test_a_connected_machine_that_forgot_the_others_is_connected_again(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=2)
    head = ids(cloud)[0]
    cloud.ec2.delete_tags(Resources=[head], Tags=[{"Key": tags.MESH}])
    cloud.change_machine(head, names={}, mesh="")

    cloud.up()

    assert_whole(cloud, 2)


def test_a_budget_is_not_spent_a_second_time_unasked(cloud: SimulatedCloud) -> None:
    cloud.faults("[[capacity]]\nfree = 0\n")
    with pytest.raises(NoCapacityError):
        cloud.up(nodes=8, ttl=8 * HOUR, budget=100.0)
    assert cloud.plan_input(nodes=1).record.dearest["nodes"] == 1, "nothing was bought"
    cloud.clock.sleep(3600)
    cloud.faults("")
    cloud.up(nodes=1)
    cloud.end(ids(cloud)[0])
    cloud.clock.sleep(3600)

    with pytest.raises(
        UsageError, match=r"have ended, and their --budget of \$100 with them"
    ) as no:
        cloud.plan_input()

    assert "up --budget 100 --name bert" in str(no.value.hint)
    assert cloud.plan_input(budget=100.0).record.options["budget"] == 100
    events = cloud.ctx.files.events
    lines = events.read_text().splitlines(keepends=True)
    for left in ([line for line in lines if '"bought"' not in line], []):
        events.write_text("".join(left))
        with pytest.raises(UsageError, match="have ended"):
            cloud.plan_input()
