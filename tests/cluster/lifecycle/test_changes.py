"""A cluster that exists: it grows, shrinks, is repaired, and keeps what it was created with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from infra.ec2 import tags
from infra.ec2.instances import label_instances
from infra.errors import SprError, UsageError
from infra.plan.actions import ActionKind, Plan
from infra.plan.planner import PlanInput
from tests.harness.simulated_cloud import SimulatedCloud

HOUR = timedelta(hours=1)


def ids(simulated_cloud: SimulatedCloud) -> list[str]:
    """The nodes in the order of their ranks."""
    return [node.instance.id for node in simulated_cloud.cluster().nodes]


def assert_whole(simulated_cloud: SimulatedCloud, nodes: int) -> None:
    """So many connected nodes, and no machine besides; every one knows every other."""
    cluster = simulated_cloud.cluster()
    assert cluster.is_whole
    assert len(cluster.nodes) == nodes
    assert len(simulated_cloud.found("instances").alive) == nodes
    names = {node.name: node.private_ip for node in cluster.nodes}
    machines = [simulated_cloud.machine(id_) for id_ in ids(simulated_cloud)]
    assert all(machine["names"] == names for machine in machines)
    assert len({machine["mesh"] for machine in machines}) == 1
    assert not simulated_cloud.plan().changes


@pytest.mark.parametrize("nodes", [1, 2])
def test_it_grows_and_those_that_are_there_keep_their_ranks(
    simulated_cloud: SimulatedCloud, nodes: int
) -> None:
    simulated_cloud.prepared(nodes=nodes)
    before = ids(simulated_cloud)

    simulated_cloud.up(nodes=nodes + 2)

    assert_whole(simulated_cloud, nodes + 2)
    assert ids(simulated_cloud)[:nodes] == before
    assert len(simulated_cloud.found("images").images) == 1
    assert simulated_cloud.steps.count("install.sh") == 1


def test_it_shrinks_by_its_highest_ranks(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=4)
    before = ids(simulated_cloud)

    simulated_cloud.up(nodes=2)

    assert_whole(simulated_cloud, 2)
    assert ids(simulated_cloud) == before[:2]


def test_nodes_of_a_grown_cluster_end_with_the_others(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2, ttl=2 * HOUR)
    simulated_cloud.clock.sleep(3600)

    simulated_cloud.up(nodes=3)

    ends = {machine.tags[tags.EXPIRES] for machine in simulated_cloud.found("instances").instances}
    assert ends == {simulated_cloud.expires(2 * HOUR)}


# Mending


def lose_worker(simulated_cloud: SimulatedCloud) -> str:
    lost = ids(simulated_cloud)[1]
    simulated_cloud.end(lost)
    return lost


def stop_worker(simulated_cloud: SimulatedCloud) -> str:
    lost = ids(simulated_cloud)[1]
    simulated_cloud.ec2.stop_instances(InstanceIds=[lost])
    return lost


def impair_worker(simulated_cloud: SimulatedCloud) -> str:
    lost = ids(simulated_cloud)[1]
    simulated_cloud.fake.backend.lifecycle.impaired.add(lost)
    # Before, it could be booting.
    simulated_cloud.clock.now += 2400
    return lost


def cut_off_worker(simulated_cloud: SimulatedCloud) -> str:
    lost = ids(simulated_cloud)[1]
    simulated_cloud.break_ssh(lost)
    simulated_cloud.clock.pace = 20
    return lost


@pytest.mark.parametrize("harm", [lose_worker, stop_worker, impair_worker, cut_off_worker])
def test_a_worker_that_fails_is_replaced(
    simulated_cloud: SimulatedCloud, harm: Callable[[SimulatedCloud], str]
) -> None:
    simulated_cloud.prepared(nodes=3)
    head, _, last = ids(simulated_cloud)
    lost = harm(simulated_cloud)

    simulated_cloud.up()

    assert_whole(simulated_cloud, 3)
    assert ids(simulated_cloud)[:2] == [head, last]
    assert lost not in simulated_cloud.found("instances").ids()["instances"]


def test_a_machine_that_changes_its_mind_is_what_the_next_plan_sees(
    simulated_cloud: SimulatedCloud,
) -> None:
    """The worker ends between the look and the work."""
    simulated_cloud.prepared(nodes=3)
    plan_input = simulated_cloud.plan_input(nodes=4)
    lost = lose_worker(simulated_cloud)

    simulated_cloud.apply(plan_input)

    assert_whole(simulated_cloud, 4)
    assert lost not in ids(simulated_cloud)


def test_the_next_node_replaces_a_missing_head(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=3)
    head, second, third = ids(simulated_cloud)
    simulated_cloud.end(head)
    with pytest.raises(UsageError, match="cluster 'bert' has no running head node"):
        simulated_cloud.cluster()

    simulated_cloud.up()

    assert_whole(simulated_cloud, 3)
    assert ids(simulated_cloud)[:2] == [second, third]
    names = {machine.tags["Name"] for machine in simulated_cloud.found("instances").instances}
    assert names == {"bert-head", "bert-worker"}
    assert simulated_cloud.steps.count("install.sh") == 1


def test_all_nodes_are_recreated_from_the_image(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=2)
    for lost in ids(simulated_cloud):
        simulated_cloud.end(lost)

    simulated_cloud.up()

    assert_whole(simulated_cloud, 2)
    assert simulated_cloud.steps.count("install.sh") == 1


def test_a_stopped_head_is_refused_and_nothing_changes(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2)
    head = ids(simulated_cloud)[0]
    simulated_cloud.ec2.stop_instances(InstanceIds=[head])
    before = simulated_cloud.writes()

    with pytest.raises(SprError, match=f"the head node {head} is stopped"):
        simulated_cloud.up(nodes=3)
    assert simulated_cloud.writes() == before


# What is shown is what is done


class Told:
    """The plans that a run was led to, after its first."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.reasons: list[str] = []

    def __call__(self, _: PlanInput, plan: Plan, reason: str) -> None:
        self.plans.append(plan)
        self.reasons.append(reason)


def test_a_plan_changes_nothing_and_is_what_up_then_does(simulated_cloud: SimulatedCloud) -> None:
    plan = simulated_cloud.plan(nodes=3)
    assert simulated_cloud.writes() == []
    assert not simulated_cloud.ctx.files.exist

    simulated_cloud.up(nodes=3)

    assert simulated_cloud.progress.phases == [action.title for action in plan.actions]


def test_a_new_plan_is_reported_with_its_reason(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.faults('[[machine]]\nn = 1\nfate = "dies"\n')
    result = Told()

    simulated_cloud.apply(simulated_cloud.plan_input(nodes=2), result)

    assert len(result.plans) == 1
    assert "terminated" in result.reasons[0]
    assert ActionKind.RUN_WORKERS in {action.kind for action in result.plans[0].actions}


# An image that is kept


def test_from_a_kept_image_all_nodes_come_at_once(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2)
    simulated_cloud.down(keep_image=True)
    before = len(simulated_cloud.purchases())

    simulated_cloud.up(nodes=3)

    assert_whole(simulated_cloud, 3)
    (request,) = simulated_cloud.purchases()[before:]
    assert request["MinCount"] == 3
    assert simulated_cloud.steps.count("install.sh") == 1
    assert len(simulated_cloud.found("images").images) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_an_image_of_other_software_is_not_used_and_goes_unless_it_was_kept(
    simulated_cloud: SimulatedCloud, kept: bool
) -> None:
    simulated_cloud.prepared(nodes=2)
    simulated_cloud.down(keep_image=True)
    (old,) = simulated_cloud.found("images").images
    labels = {tags.INSTALLED: "ffffffffffff", tags.KEPT: "yes" if kept else "no"}
    label_instances(simulated_cloud.ec2, [old.id], labels)

    simulated_cloud.up(nodes=2)

    images = {image.id for image in simulated_cloud.found("images").images}
    assert (old.id in images) is kept
    assert len(images - {old.id}) == 1
    assert simulated_cloud.steps.count("install.sh") == 2
    simulated_cloud.down()
    assert simulated_cloud.left() == []


def test_a_connected_machine_that_forgot_the_others_is_connected_again(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=2)
    head = ids(simulated_cloud)[0]
    simulated_cloud.ec2.delete_tags(Resources=[head], Tags=[{"Key": tags.MESH}])
    simulated_cloud.change_machine(head, names={}, mesh="")

    simulated_cloud.up()

    assert_whole(simulated_cloud, 2)


def test_a_context_without_a_host_factory_uses_ssh(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1)
    node = simulated_cloud.cluster().head
    ctx = replace(simulated_cloud.ctx, make_host=None)

    assert ctx.host_opener()(node).name == "node0"
    simulated_cloud.ctx.files.key.unlink()
    with pytest.raises(UsageError, match="the cluster's key is not on this machine"):
        ctx.host_opener()(node)


def test_a_budget_is_not_spent_a_second_time_unasked(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1, ttl=8 * HOUR, budget=100.0)
    simulated_cloud.end(ids(simulated_cloud)[0])
    simulated_cloud.clock.sleep(3600)

    with pytest.raises(
        UsageError, match=r"have ended, and their --budget of \$100 with them"
    ) as no:
        simulated_cloud.plan_input()

    assert "up --budget 100 --name bert" in str(no.value.hint)
    assert simulated_cloud.plan_input(budget=100.0).record.options["budget"] == 100
