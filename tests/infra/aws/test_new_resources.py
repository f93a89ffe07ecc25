"""Denials that mean "not visible yet", and those that mean denied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infra.aws.new_resources import NewResources
from infra.wait import CONSISTENCY_DEADLINE_S
from tests.infra.local.fakes import FakeTime

GROUP = {"GroupId": "sg-1", "ResponseMetadata": {}}
MACHINES = {"Instances": [{"InstanceId": "i-1", "SubnetId": "subnet-1", "ImageId": "ami-1"}]}


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr("infra.aws.new_resources.time", time)
    return time


@pytest.fixture
def new(time: FakeTime) -> NewResources:
    """A command that has just made a group, two machines, and an image."""
    new = NewResources()
    image = {"ImageId": "ami-2"}
    for name, answer in (
        ("CreateSecurityGroup", GROUP),
        ("RunInstances", MACHINES),
        ("CreateImage", image),
        ("DescribeInstances", {"Reservations": [{"InstanceId": "i-2"}]}),
        ("CreatePlacementGroup", {"Error": {"Code": "x", "Message": "y"}}),
    ):
        new.learn(parsed=answer, model=SimpleNamespace(name=name))
    return new


def pause(
    new: NewResources,
    resource: str,
    operation: str = "TerminateInstances",
    code: str = "UnauthorizedOperation",
    **body: Any,
) -> float | None:
    on = f" on resource: arn:aws:ec2:us-east-1:1:{resource}" if resource else ""
    text = f"not authorized to perform: ec2:{operation}{on} because no identity-based policy allows"
    error = {"Error": {"Code": code, "Message": text}}
    return new.pause(
        response=(None, error),
        operation=SimpleNamespace(name=operation),
        request_dict={"body": body},
        attempts=1,
    )


def test_only_a_denial_about_what_was_just_made_is_repeated(new: NewResources) -> None:
    for resource in ("instance/i-1", "security-group/sg-1", "image/ami-2"):
        assert pause(new, resource) == 3
    for resource in ("instance/*", "instance/i-2", "image/ami-1", "subnet/subnet-1", ""):
        assert pause(new, resource, GroupId="sg-1") is None
    assert pause(new, "instance/i-1", code="IncorrectInstanceState") is None
    # The snapshots of a new image are new.
    named = {"ResourceId.1": "ami-2", "ResourceId.2": "snap-1"}
    assert pause(new, "snapshot/snap-1", "CreateTags", **named) == 3
    assert pause(new, "snapshot/snap-1", "CreateTags", **{"ResourceId.1": "snap-1"}) is None
    # An answer was lost.
    operation = SimpleNamespace(name="TerminateInstances")
    assert new.pause(response=None, operation=operation, request_dict={"body": {}}) is None


def test_after_a_while_nothing_is_new(new: NewResources, time: FakeTime) -> None:
    time.sleep(CONSISTENCY_DEADLINE_S - 1)
    assert pause(new, "instance/i-1") == 3
    time.sleep(2)
    assert pause(new, "instance/i-1") is None
