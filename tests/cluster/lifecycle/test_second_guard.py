"""The second guard, outside the machines: it ends those that do not end themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from infra.aws.clients import error_code
from infra.ec2 import tags
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
def _on_time(cloud: SimulatedCloud) -> None:
    cloud.engine.ends_on_time = True


def schedules(cloud: SimulatedCloud) -> dict[str, datetime]:
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


def expected(cloud: SimulatedCloud, ttl: timedelta) -> dict[str, datetime]:
    """A schedule for each machine of the cluster."""
    end = datetime.fromtimestamp(cloud.began, timezone.utc) + ttl + GRACE + AFTER
    return {node.instance.id: end for node in cloud.cluster().nodes}


def machines(cloud: SimulatedCloud) -> list[str]:
    """The machines that cost money."""
    cloud.ec2.describe_instances()
    live = cloud.fake.backend.all_instances()
    return [i.id for i in live if i.state != "terminated"]


@contextmanager
def dies_at(cloud: SimulatedCloud, client: str, operation: str) -> Iterator[None]:
    """The command is killed where it would send the first such request."""
    events = getattr(cloud.ctx.clients, client).meta.events

    def die(**_: Any) -> None:
        raise KeyboardInterrupt

    events.register(f"before-send.{client}.{operation}", die)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        events.unregister(f"before-send.{client}.{operation}", die)


def buy_and_be_killed(cloud: SimulatedCloud, **given: Any) -> None:
    """`up`, until the first machine runs: the laptop is closed while it waits for SSH."""

    def die() -> None:
        raise KeyboardInterrupt

    cloud.steps.before["^true$"] = die
    real = cloud.ctx.clock.sleep

    def sleep(seconds: float) -> None:
        if cloud.purchases():
            raise KeyboardInterrupt
        real(seconds)

    cloud.clock.sleep = sleep  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            cloud.up(**given)
    finally:
        del cloud.clock.sleep
        cloud.steps.before.clear()


def test_it_ends_a_machine_that_never_boots(cloud: SimulatedCloud) -> None:
    cloud.faults(NO_GUEST)
    buy_and_be_killed(cloud, **GUARDED)
    (bare,) = machines(cloud)
    assert cloud.fake.state_of(bare) == "running"

    cloud.clock.sleep((2 * HOUR + GRACE + AFTER).total_seconds() - 60)
    assert machines(cloud) == [bare]
    cloud.clock.sleep(120)
    assert machines(cloud) == []
    assert schedules(cloud) == {}

    cloud.down()
    assert cloud.left() == []


def test_each_machine_has_a_schedule_and_the_role_the_least_rights(cloud: SimulatedCloud) -> None:
    cloud.faults("role_visibility_s = 12\n")

    cluster = cloud.up(nodes=2, **GUARDED)

    assert not cloud.plan(second_guard=True).changes
    assert schedules(cloud) == expected(cloud, 2 * HOUR)
    head = cluster.head.instance.id
    clients = cloud.ctx.clients
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


def test_a_role_that_never_works_is_a_failure(cloud: SimulatedCloud) -> None:
    cloud.faults("role_visibility_s = 4000\n")

    with pytest.raises(ClientError, match="must allow AWS EventBridge Scheduler") as caught:
        cloud.up(nodes=1, **GUARDED)
    assert error_code(caught.value) == "ValidationException"
    cloud.faults("")
    cloud.up()
    assert schedules(cloud) == expected(cloud, 2 * HOUR)


def test_the_next_up_mends_what_a_kill_left(cloud: SimulatedCloud) -> None:
    for client, operation in (("iam", "PutRolePolicy"), ("scheduler", "CreateSchedule")):
        with dies_at(cloud, client, operation):
            cloud.up(nodes=2, **GUARDED)
        assert bool(machines(cloud)) == (operation == "CreateSchedule")
        assert ActionKind.GUARD in [action.kind for action in cloud.plan().actions]

    cloud.up()

    assert schedules(cloud) == expected(cloud, 2 * HOUR)
    cloud.down()
    assert cloud.left() == []


def test_a_cluster_can_get_it_later_and_new_machines_have_it_too(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2, ttl=2 * HOUR)
    plan = cloud.plan(second_guard=True)
    ids = tuple(node.instance.id for node in cloud.cluster().nodes)
    assert [a.ids for a in plan.actions if a.kind is ActionKind.GUARD] == [ids]

    cloud.up(second_guard=True)
    assert schedules(cloud) == expected(cloud, 2 * HOUR)
    cloud.end(ids[1])
    cloud.up(nodes=3)

    wanted = expected(cloud, 2 * HOUR)
    assert wanted.items() <= schedules(cloud).items()
    # EC2 has forgotten the lost machine long before its schedule, and that of the others still acts.
    for machine in wanted:
        cloud.change_machine(machine, expires=2_000_000_000)
    cloud.clock.sleep(3 * 3600)
    assert machines(cloud) == []
    assert schedules(cloud) == {}


def test_extend_moves_it_before_anything_else(cloud: SimulatedCloud) -> None:
    cloud.up(nodes=2, **GUARDED)
    cloud.faults('[[error]]\naction = "CreateTags"\ncode = "UnauthorizedOperation"\n')

    with pytest.raises(SprError, match="no permission for CreateTags"):
        extend(cloud.ctx, HOUR)
    assert schedules(cloud) == expected(cloud, 3 * HOUR)
    cloud.faults("")
    extend(cloud.ctx, 2 * HOUR)
    assert schedules(cloud) == expected(cloud, 4 * HOUR)
    cloud.clock.sleep(3.5 * 3600)
    assert len(machines(cloud)) == 2


def test_down_removes_it_from_another_machine_and_waits_until_its_group_is_gone(
    cloud: SimulatedCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.up(nodes=2, **GUARDED)
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "elsewhere"))
    cloud.faults("terminate_s = 20\n")

    removed = down(replace(cloud.ctx, files=ClusterFiles.of(NAME)))

    assert removed.ids["guards"] == [f"spr-cluster-{NAME}"]
    assert cloud.left() == []


def test_up_waits_until_an_earlier_group_is_gone(cloud: SimulatedCloud) -> None:
    scheduler = cloud.ctx.clients.scheduler
    scheduler.create_schedule_group(Name=f"spr-cluster-{NAME}")
    cloud.faults("terminate_s = 20\n")
    scheduler.delete_schedule_group(Name=f"spr-cluster-{NAME}")

    cloud.up(nodes=1, **GUARDED)

    cloud.clock.sleep(20)
    wanted = expected(cloud, 2 * HOUR)
    assert schedules(cloud) == wanted


def test_down_can_be_repeated_after_a_denial_because_the_record_of_it_is_still_there(
    cloud: SimulatedCloud,
) -> None:
    cloud.up(nodes=1, **GUARDED)
    for operation in ("ListSchedules", "DeleteRolePolicy", "DeleteScheduleGroup"):
        denied = f"action = '{operation}'\ncode = 'AccessDeniedException'\nstatus = 403\n"
        cloud.faults(f"[[error]]\n{denied}")

        with pytest.raises(ClientError, match="AccessDenied"):
            cloud.down()
        assert machines(cloud) == []
        assert cloud.found("security_groups").group
    cloud.faults("")
    cloud.down()
    assert cloud.left() == []
    assert not iam_backends[ACCOUNT]["aws"].roles
