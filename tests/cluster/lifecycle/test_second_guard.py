"""The second guard, outside the machines: it ends those that do not end themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.iam.models import iam_backends
from moto.scheduler.models import scheduler_backends

from cluster.lifecycle.deadline import extend
from cluster.lifecycle.down import down
from cluster.local_files import ClusterFiles
from cluster.overview import list_clusters
from infra.aws.clients import error_code
from infra.ec2 import tags
from infra.ec2.termination_schedule import ClusterGuard
from infra.errors import SprError
from infra.lifetime import AFTER
from infra.plan.actions import ActionKind
from tests.harness.simulated_cloud import NAME, SimulatedCloud

HOUR = timedelta(hours=1)
GRACE = timedelta(minutes=30)
GUARDED: dict[str, Any] = {"second_guard": True, "ttl": 2 * HOUR}
ACCOUNT, REGION = "123456789012", "us-east-1"
NO_GUEST = '[[machine]]\nfate = "no-guest"\n'


@pytest.fixture(autouse=True)
def _on_time(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.engine.ends_on_time = True


def schedules(simulated_cloud: SimulatedCloud) -> dict[str, datetime]:
    """When each machine with a schedule is terminated."""
    regions = scheduler_backends[ACCOUNT]
    groups = regions[REGION].schedule_groups.values() if REGION in regions else ()
    return {
        name: datetime.strptime(schedule.schedule_expression, "at(%Y-%m-%dT%H:%M:%S)").replace(
            tzinfo=timezone.utc
        )
        for group in groups
        for name, schedule in group.schedules.items()
    }


def expected(simulated_cloud: SimulatedCloud, ttl: timedelta) -> dict[str, datetime]:
    """A schedule for each machine of the cluster."""
    end = datetime.fromtimestamp(simulated_cloud.began, timezone.utc) + ttl + GRACE + AFTER
    return {node.instance.id: end for node in simulated_cloud.cluster().nodes}


def machines(simulated_cloud: SimulatedCloud) -> list[str]:
    """The machines that cost money."""
    simulated_cloud.ec2.describe_instances()
    live = simulated_cloud.fake.backend.all_instances()
    return [i.id for i in live if i.state != "terminated"]


@contextmanager
def dies_at(simulated_cloud: SimulatedCloud, client: str, operation: str) -> Iterator[None]:
    """The command is killed where it would send the first such request."""
    events = getattr(simulated_cloud.ctx.clients, client).meta.events

    def die(**_: Any) -> None:
        raise KeyboardInterrupt

    events.register(f"before-send.{client}.{operation}", die)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        events.unregister(f"before-send.{client}.{operation}", die)


def buy_and_be_killed(simulated_cloud: SimulatedCloud, **given: Any) -> None:
    """`up`, until the first machine runs: the laptop is closed while it waits for SSH."""

    def die() -> None:
        raise KeyboardInterrupt

    simulated_cloud.steps.before["^true$"] = die
    real = simulated_cloud.ctx.clock.sleep

    def sleep(seconds: float) -> None:
        if simulated_cloud.purchases():
            raise KeyboardInterrupt
        real(seconds)

    simulated_cloud.clock.sleep = sleep  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            simulated_cloud.up(**given)
    finally:
        del simulated_cloud.clock.sleep
        simulated_cloud.steps.before.clear()


@pytest.mark.parametrize("second_guard", [False, True])
def test_only_the_second_guard_ends_a_machine_that_never_boots(
    simulated_cloud: SimulatedCloud, second_guard: bool
) -> None:
    simulated_cloud.be("instant")
    simulated_cloud.faults(NO_GUEST)
    buy_and_be_killed(simulated_cloud, **{**GUARDED, "second_guard": second_guard})
    (bare,) = machines(simulated_cloud)
    assert simulated_cloud.fake.state_of(bare) == "running"

    simulated_cloud.clock.sleep((2 * HOUR + GRACE + AFTER).total_seconds() - 60)
    assert machines(simulated_cloud) == [bare]
    simulated_cloud.clock.sleep(120)
    assert machines(simulated_cloud) == ([] if second_guard else [bare])
    simulated_cloud.clock.sleep(30 * 24 * 3600)
    assert machines(simulated_cloud) == ([] if second_guard else [bare])
    assert schedules(simulated_cloud) == {}

    simulated_cloud.down()
    assert simulated_cloud.left() == []


def test_machines_that_end_themselves_are_left_to_it(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.be("instant")
    simulated_cloud.up(nodes=2, **GUARDED)
    simulated_cloud.clock.sleep(2 * 3600)
    assert machines(simulated_cloud) == []
    simulated_cloud.clock.sleep(3600)
    assert machines(simulated_cloud) == []


def test_each_machine_has_a_schedule_and_the_role_the_least_rights(
    simulated_cloud: SimulatedCloud,
) -> None:
    cluster = simulated_cloud.up(nodes=3, **GUARDED)

    assert not simulated_cloud.plan(second_guard=True).changes
    assert schedules(simulated_cloud) == expected(simulated_cloud, 2 * HOUR)
    head = cluster.head.instance.id
    clients = simulated_cloud.ctx.clients
    schedule = clients.scheduler.get_schedule(GroupName=f"spr-cluster-{NAME}", Name=head)
    assert schedule["ActionAfterCompletion"] == "DELETE"
    assert schedule["ScheduleExpressionTimezone"] == "UTC"
    assert json.loads(schedule["Target"]["Input"]) == {"InstanceIds": [head]}
    assert schedule["Target"]["Arn"] == "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
    role = clients.iam.get_role(RoleName=f"spr-cluster-{NAME}-{REGION}-end")["Role"]
    assert schedule["Target"]["RoleArn"] == role["Arn"]
    assert tags.from_aws(role["Tags"])[tags.CLUSTER] == NAME
    group = clients.scheduler.get_schedule_group(Name=f"spr-cluster-{NAME}")["Arn"]
    labels = clients.scheduler.list_tags_for_resource(ResourceArn=group)["Tags"]
    assert tags.from_aws(labels)[tags.CLUSTER] == NAME
    document: Any = role["AssumeRolePolicyDocument"]
    (trust,) = document["Statement"]
    assert trust["Principal"] == {"Service": "scheduler.amazonaws.com"}
    assert trust["Condition"] == {
        "StringEquals": {"aws:SourceAccount": ACCOUNT, "aws:SourceArn": group}
    }
    policy: Any = clients.iam.get_role_policy(RoleName=role["RoleName"], PolicyName="spr-cluster")
    assert policy["PolicyDocument"]["Statement"] == [
        {
            "Effect": "Allow",
            "Action": "ec2:TerminateInstances",
            "Resource": f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/*",
            "Condition": {"StringEquals": {"aws:ResourceTag/spr-cluster:cluster": NAME}},
        }
    ]


def test_the_role_may_end_no_other_machine(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.be("instant")
    simulated_cloud.up(nodes=1, **GUARDED)
    (other,) = simulated_cloud.fake.run()
    clients, group = simulated_cloud.ctx.clients, f"spr-cluster-{NAME}"
    (own,) = schedules(simulated_cloud)
    known = clients.scheduler.get_schedule(GroupName=group, Name=own)
    kept = ("ScheduleExpression", "FlexibleTimeWindow", "Target", "GroupName")
    request: Any = {key: known[key] for key in kept}  # type: ignore[literal-required]
    request["Target"]["Input"] = json.dumps({"InstanceIds": [other]})
    clients.scheduler.create_schedule(Name=other, **request)

    simulated_cloud.clock.sleep(3 * 3600)

    assert machines(simulated_cloud) == [other]


def test_a_new_role_is_waited_for(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.faults("role_visibility_s = 12\n")

    simulated_cloud.up(nodes=2, **GUARDED)

    assert schedules(simulated_cloud) == expected(simulated_cloud, 2 * HOUR)


def test_a_role_that_never_works_is_a_failure(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.faults("role_visibility_s = 4000\n")

    with pytest.raises(ClientError, match="must allow AWS EventBridge Scheduler") as caught:
        simulated_cloud.up(nodes=1, **GUARDED)
    assert error_code(caught.value) == "ValidationException"
    simulated_cloud.faults("")
    simulated_cloud.up()
    assert schedules(simulated_cloud) == expected(simulated_cloud, 2 * HOUR)


@pytest.mark.parametrize(
    ("client", "operation"),
    [
        ("scheduler", "CreateScheduleGroup"),
        ("iam", "CreateRole"),
        ("iam", "PutRolePolicy"),
        ("scheduler", "CreateSchedule"),
    ],
)
def test_the_next_up_mends_what_a_kill_left(
    simulated_cloud: SimulatedCloud, client: str, operation: str
) -> None:
    with dies_at(simulated_cloud, client, operation):
        simulated_cloud.up(nodes=2, **GUARDED)
    assert bool(machines(simulated_cloud)) == (operation == "CreateSchedule")
    planned = simulated_cloud.plan()
    assert ActionKind.GUARD in [action.kind for action in planned.actions]

    simulated_cloud.up()

    assert schedules(simulated_cloud) == expected(simulated_cloud, 2 * HOUR)
    simulated_cloud.down()
    assert simulated_cloud.left() == []


def test_a_cluster_can_get_it_later_and_keeps_it(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=2, ttl=2 * HOUR)
    plan = simulated_cloud.plan(second_guard=True)
    ids = tuple(node.instance.id for node in simulated_cloud.cluster().nodes)
    assert [a.ids for a in plan.actions if a.kind is ActionKind.GUARD] == [ids]

    simulated_cloud.up(second_guard=True)
    assert schedules(simulated_cloud) == expected(simulated_cloud, 2 * HOUR)
    simulated_cloud.up(nodes=3)
    assert schedules(simulated_cloud) == expected(simulated_cloud, 2 * HOUR)


def test_extend_moves_it_before_anything_else(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.up(nodes=2, **GUARDED)
    simulated_cloud.faults('[[error]]\naction = "CreateTags"\ncode = "UnauthorizedOperation"\n')

    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        extend(simulated_cloud.ctx, NAME, HOUR)
    assert schedules(simulated_cloud) == expected(simulated_cloud, 3 * HOUR)
    simulated_cloud.faults("")
    extend(simulated_cloud.ctx, NAME, 2 * HOUR)
    assert schedules(simulated_cloud) == expected(simulated_cloud, 4 * HOUR)
    simulated_cloud.clock.sleep(3.5 * 3600)
    assert len(machines(simulated_cloud)) == 2


def test_repair_gives_the_new_machine_a_schedule(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.be("instant")
    cluster = simulated_cloud.up(nodes=2, **GUARDED)
    simulated_cloud.end(cluster.workers[0].instance.id)

    simulated_cloud.up()

    wanted = expected(simulated_cloud, 2 * HOUR)
    assert wanted.items() <= schedules(simulated_cloud).items()
    # EC2 has forgotten the lost machine long before its schedule, and that of the others still acts.
    for machine in wanted:
        simulated_cloud.change_machine(machine, expires=2_000_000_000)
    simulated_cloud.clock.sleep(3 * 3600)
    assert machines(simulated_cloud) == []
    assert schedules(simulated_cloud) == {}


def test_down_removes_it_from_another_machine_and_waits_until_its_group_is_gone(
    simulated_cloud: SimulatedCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_cloud.up(nodes=2, **GUARDED)
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "elsewhere"))
    simulated_cloud.faults("terminate_s = 90\n")

    removed = down(replace(simulated_cloud.ctx, files=ClusterFiles.of(NAME)), NAME)

    assert removed.ids["guards"] == [f"spr-cluster-{NAME}"]
    assert simulated_cloud.left() == []


def test_up_waits_until_an_earlier_group_is_gone(simulated_cloud: SimulatedCloud) -> None:
    scheduler = simulated_cloud.ctx.clients.scheduler
    scheduler.create_schedule_group(Name=f"spr-cluster-{NAME}")
    simulated_cloud.faults("terminate_s = 90\n")
    scheduler.delete_schedule_group(Name=f"spr-cluster-{NAME}")

    simulated_cloud.up(nodes=1, **GUARDED)

    simulated_cloud.clock.sleep(90)
    wanted = expected(simulated_cloud, 2 * HOUR)
    assert schedules(simulated_cloud) == wanted


def lose_record(simulated_cloud: SimulatedCloud) -> None:
    """Somebody has removed everything of EC2's."""
    for machine in machines(simulated_cloud):
        simulated_cloud.end(machine)
    group = simulated_cloud.found("security_groups").group
    assert group is not None
    simulated_cloud.ec2.delete_security_group(GroupId=group.id)


def lose_record_and_schedules(simulated_cloud: SimulatedCloud) -> None:
    lose_record(simulated_cloud)
    simulated_cloud.ctx.clients.scheduler.delete_schedule_group(Name=f"spr-cluster-{NAME}")


@pytest.mark.parametrize("lose", [lose_record, lose_record_and_schedules])
def test_down_finds_it_without_the_record(
    simulated_cloud: SimulatedCloud, lose: Callable[[SimulatedCloud], None]
) -> None:
    simulated_cloud.be("instant")
    simulated_cloud.up(nodes=1, **GUARDED)
    lose(simulated_cloud)

    simulated_cloud.down()

    assert simulated_cloud.left() == []


def test_an_account_shows_it_if_nothing_else_is_left(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.be("instant")
    simulated_cloud.up(nodes=1, bake="none", **GUARDED)
    lose_record(simulated_cloud)
    simulated_cloud.ctx.clients.scheduler.create_schedule_group(Name="spr-cluster-of-others")
    for image in simulated_cloud.found("images").images:
        simulated_cloud.ec2.deregister_image(ImageId=image.id)

    found, _ = list_clusters(simulated_cloud.ctx.cloud, [REGION])

    assert [each.name for each in found] == [NAME]
    assert found[0].found.ids()["guards"] == [f"spr-cluster-{NAME}"]
    assert found[0].is_orphan(simulated_cloud.ctx.now())


@pytest.mark.parametrize("operation", ["DeleteRolePolicy", "DeleteScheduleGroup"])
def test_down_can_be_repeated_after_a_kill_or_a_denial(
    simulated_cloud: SimulatedCloud, operation: str
) -> None:
    simulated_cloud.up(nodes=1, **GUARDED)
    denied = f"action = '{operation}'\ncode = 'AccessDeniedException'\nstatus = 403\n"
    simulated_cloud.faults(f"[[error]]\n{denied}")

    with pytest.raises(ClientError, match="AccessDenied"):
        simulated_cloud.down()
    # The record of it is still there.
    assert simulated_cloud.found("security_groups").group
    simulated_cloud.faults("")
    simulated_cloud.down()
    assert simulated_cloud.left() == []


def test_a_cluster_without_it_needs_no_permission_for_it(
    simulated_cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_cloud.prepared(nodes=1)

    def fail(*_: Any) -> None:
        raise AssertionError("a look at the second guard of a cluster that has none")

    monkeypatch.setattr(ClusterGuard, "__init__", fail)
    simulated_cloud.up(nodes=2)
    extend(simulated_cloud.ctx, NAME, HOUR)
    simulated_cloud.down()

    assert simulated_cloud.left() == []


def test_whoever_may_not_look_has_none(simulated_cloud: SimulatedCloud) -> None:
    for action in ("ListSchedules", "ListScheduleGroups", "GetRole"):
        code = "code = 'AccessDeniedException'\nstatus = 403\ntimes = 100\n"
        simulated_cloud.faults(f"[[error]]\naction = '{action}'\n{code}")

        assert simulated_cloud.down().ids == {}
        assert list_clusters(simulated_cloud.ctx.cloud, [REGION]) == ((), {})


def test_a_denied_look_at_a_guard_on_record_is_an_error(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.up(nodes=1, **GUARDED)
    denied = "action = 'ListSchedules'\ncode = 'AccessDeniedException'\nstatus = 403\n"
    simulated_cloud.faults(f"[[error]]\n{denied}")

    with pytest.raises((ClientError, SprError), match="AccessDenied"):
        simulated_cloud.down()
    assert machines(simulated_cloud) == []
    assert simulated_cloud.found("security_groups").group, "the record of the guard"
    simulated_cloud.down()
    assert simulated_cloud.left() == []
    assert not iam_backends[ACCOUNT]["aws"].roles
