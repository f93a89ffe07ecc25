"""EventBridge Scheduler in the embedded cloud: it refuses what AWS refuses, and carries schedules out."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from infra.ec2.tags import CLUSTER
from infra.ec2.termination_schedule import ClusterGuard
from infra.lifetime import AFTER
from infra.local.api.application import Application
from infra.local.state import StateFolder
from tests.cloud.application import FaultyApplication
from tests.infra.local.fakes import Endpoint, FakeCloud, FakePodman, FakeTime, refusal

START = datetime.fromtimestamp(1_800_000_000, timezone.utc)
GROUP = "spr-cluster-bert"


def guard(cloud: FakeCloud, *ids: str) -> None:
    """Guard machines whose deadline is in an hour."""
    ClusterGuard(cloud.clients, "bert", cloud.clock).protect(ids, START + timedelta(hours=1))


@pytest.mark.parametrize("kind", [Application, FaultyApplication])
def test_a_machine_that_does_not_shut_down_by_itself_is_terminated_also_after_a_restart(
    endpoint: Endpoint, folder: StateFolder, podman: FakePodman, kind: type[Application]
) -> None:
    clock = FakeTime()
    with endpoint.serve(folder, podman, clock=clock, kind=kind) as cloud:
        own = {"ResourceType": "instance", "Tags": [{"Key": CLUSTER, "Value": "bert"}]}
        (machine,) = cloud.run(TagSpecifications=[own])
        guard(cloud, machine)
    with endpoint.serve(folder, podman, clock=clock, kind=kind) as cloud:
        (found,) = ClusterGuard(cloud.clients, "bert").find()
        assert found.machines == {machine}
        scheduler = cloud.clients.scheduler
        group = scheduler.get_schedule_group(Name=GROUP)["Arn"]
        assert scheduler.list_tags_for_resource(ResourceArn=group)["Tags"]
        for minutes, state in ((-1, "running"), (1, "terminated")):
            end = START + timedelta(hours=1, minutes=minutes) + AFTER
            clock.sleep(end.timestamp() - clock.time())
            cloud.state_of(machine)  # the server notices
            assert cloud.state_of(machine) == state


def test_it_refuses_what_aws_refuses(timed_cloud: FakeCloud) -> None:
    endpoint = timed_cloud.endpoint
    scheduler, iam = endpoint.client("scheduler"), endpoint.client("iam")
    guard(timed_cloud, "i-0123")
    assert refusal(scheduler.create_schedule_group, Name=GROUP) == "ConflictException"
    known = scheduler.get_schedule(GroupName=GROUP, Name="i-0123")
    kept = ("ScheduleExpression", "FlexibleTimeWindow", "Target", "GroupName", "Name")
    request = {key: known[key] for key in kept}
    assert refusal(scheduler.create_schedule, **request) == "ConflictException"
    missing = "ResourceNotFoundException"
    elsewhere = {**request, "GroupName": "none"}
    assert refusal(scheduler.create_schedule, **elsewhere) == missing
    assert refusal(scheduler.list_schedules, GroupName="none") == missing
    assert refusal(scheduler.delete_schedule_group, Name="none") == missing
    # The trust names one group.
    scheduler.create_schedule_group(Name="other")
    other = {**request, "GroupName": "other"}
    assert refusal(scheduler.create_schedule, **other) == "ValidationException"
    role = f"{GROUP}-us-east-1-end"
    assert refusal(iam.delete_role, RoleName=role) == "DeleteConflict"
    iam.delete_role_policy(RoleName=role, PolicyName="spr-cluster")
    iam.delete_role(RoleName=role)
    assert refusal(scheduler.update_schedule, **request) == "ValidationException"
