"""Two commands and one name: a plan that no longer fits what another command made changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cluster.lifecycle.deadline import extend
from cluster.local_files import ClusterFiles
from infra.ec2.cluster_record import new_record, parse_record, record_tags
from infra.ec2.instances import label_instances
from infra.ec2.inventory import Inventory
from infra.ec2.key_pair import fingerprint, generate_key_pair, read_public
from infra.errors import SprError, UsageError
from infra.files import write_private
from infra.plan.ownership import ForeignClusterError
from tests.harness.simulated_cloud import SimulatedCloud
from tests.infra.resource_factory import ResourceFactory

DAY_S = 26 * 3600


def other_user(cloud: SimulatedCloud, folder: Path) -> SimulatedCloud:
    """The same cloud from another machine, which has no key."""
    return replace(cloud, ctx=replace(cloud.ctx, files=ClusterFiles(folder / "other" / "bert")))


def expire(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1)
    for machine in cloud.found("instances").alive:
        cloud.end(machine.id)
    cloud.clock.now += DAY_S


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_up_that_was_overtaken_ends_and_leaves_the_newer_ones_machines(
    cloud: SimulatedCloud, has_begun: bool
) -> None:
    cloud.prepared(nodes=1)
    older = cloud.plan_input(nodes=2)
    bought = []

    def note(name: str, moment: str) -> None:
        bought.extend([name] if (name, moment) == ("RunInstances", "after") else [])

    def overtake() -> None:
        if bought:
            cloud.fake.application.on_call = lambda *_: None
            cloud.steps.before.clear()
            cloud.up(nodes=3)

    if has_begun:
        cloud.fake.application.on_call = note
        cloud.steps.before[""] = overtake
    else:
        cloud.up(nodes=3)
    before = cloud.writes()

    with pytest.raises(UsageError, match="another command changed cluster 'bert'"):
        cloud.apply(older)

    assert has_begun or cloud.writes() == before
    assert len(cloud.found("instances").alive) == 3
    record = parse_record(cloud.group.tags)
    assert record is not None
    assert record.nodes == 3


def test_an_expired_cluster_that_its_owner_renews_is_not_taken_over(
    cloud: SimulatedCloud, tmp_path: Path
) -> None:
    expire(cloud)
    other = other_user(cloud, tmp_path)
    takeover = other.plan_input(nodes=1)
    wanted, group = cloud.plan_input(nodes=1), cloud.group
    record = new_record(wanted.spec, cloud.ctx.now(), None)
    renewed = record_tags(wanted.spec, record, fingerprint(wanted.public_key))
    label_instances(cloud.ec2, [group.id], renewed)
    before = cloud.writes()

    with pytest.raises(ForeignClusterError, match="belongs to another SSH key"):
        other.apply(takeover)

    assert cloud.writes() == before


def test_an_expired_cluster_is_taken_over(cloud: SimulatedCloud, tmp_path: Path) -> None:
    expire(cloud)
    old = cloud.group.id

    cluster = other_user(cloud, tmp_path).up(nodes=1)

    assert len(cluster.nodes) == 1
    assert cloud.group.id != old


def test_a_key_from_before_stays_where_another_user_was_first(
    cloud: SimulatedCloud, tmp_path: Path
) -> None:
    write_private(cloud.ctx.files.key, generate_key_pair("bert").private)
    plan = cloud.plan_input(nodes=1)
    other_user(cloud, tmp_path).up(nodes=1)

    with pytest.raises(ForeignClusterError):
        cloud.apply(plan)
    assert cloud.ctx.files.key.exists()


def test_machines_that_are_still_shutting_down_hold_the_name(
    cloud: SimulatedCloud, tmp_path: Path
) -> None:
    cloud.prepared(nodes=1)
    cloud.clock.now += DAY_S
    cloud.faults("terminate_s = 1200\n")
    ids = [machine.id for machine in cloud.found("instances").alive]
    cloud.ec2.terminate_instances(InstanceIds=ids)
    start = cloud.clock.now

    with pytest.raises(ForeignClusterError):
        other_user(cloud, tmp_path).up(nodes=1)

    assert cloud.clock.now - start < 60


def test_the_group_is_that_of_the_machines(cloud: SimulatedCloud) -> None:
    """A loser in another network may have left its own."""
    cloud.prepared(nodes=1)
    found = cloud.found("instances", "security_groups")
    (group,) = found.security_groups
    other = replace(group, id="sg-other", tags={**group.tags, "spr-cluster:owner-key": "SHA256:x"})

    assert replace(found, security_groups=(other, group)).group == group

    vpc = cloud.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    ResourceFactory(cloud.fake, cloud.ctx.name).security_groups(VpcId=vpc)
    cloud.clock.now += 60
    groups = cloud.fake.backend.groups
    for own in [each for each in groups if each != vpc]:
        groups[own] = groups.pop(own)  # EC2 may list it last
    assert cloud.found("security_groups").security_groups[1] == group
    extend(cloud.ctx, timedelta(hours=1))


def test_the_key_of_an_earlier_cluster_moves_no_end(cloud: SimulatedCloud, tmp_path: Path) -> None:
    cloud.prepared(nodes=1)
    other = other_user(cloud, tmp_path)
    other.down()
    other.up(nodes=1)
    before = cloud.writes()

    with pytest.raises(ForeignClusterError, match="belongs to another SSH key"):
        extend(cloud.ctx, timedelta(hours=1))

    assert cloud.writes() == before


def down_held_at(cloud: SimulatedCloud, call: str, meanwhile: Callable[[], object]) -> None:
    """`down`, with something else done just before a call of it."""
    events, event = cloud.ec2.meta.events, f"provide-client-params.ec2.{call}"

    def act(**_: object) -> None:
        events.unregister(event, act)
        meanwhile()

    events.register(event, act)
    cloud.down()


@pytest.mark.parametrize("call", ["TerminateInstances", "DeletePlacementGroup"])
def test_down_leaves_a_newer_cluster_of_the_same_name_alone(
    cloud: SimulatedCloud, tmp_path: Path, call: str
) -> None:
    cloud.prepared(nodes=1)
    other = other_user(cloud, tmp_path)

    def make_again() -> None:
        other.down()
        other.up(nodes=1)

    with pytest.raises(SprError, match="since its removal was approved, another command of") as it:
        down_held_at(cloud, call, make_again)

    (machine,) = other.found("instances").instances
    assert machine.state == "running"
    assert machine.id in str(it.value)
    assert [k.public for k in other.found("key_pairs").key_pairs] == [
        read_public(other.ctx.files.key)
    ]
    assert cloud.ctx.files.exist


def test_down_leaves_what_another_command_has_changed_since(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1)
    shown = cloud.found()
    cloud.up(nodes=2)
    before = cloud.left()

    with pytest.raises(SprError, match=r"another command of .* has made or changed the cluster"):
        cloud.down(approved=shown)

    assert cloud.left() == before
    # EC2 may list the rest only after the approval.
    cloud.down(approved=Inventory(key_pairs=shown.key_pairs))
    assert cloud.left() == []
