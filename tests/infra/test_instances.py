"""Machines at EC2's edges: what is not shown yet, and more of them than a filter takes."""

from __future__ import annotations

import pytest

from infra.clients import Clients
from infra.errors import CloudError
from infra.instances import terminate_instances, wait_until_running
from tests.aws import Recorder
from tests.fakes import FakeClock


def launch(clients: Clients, count: int) -> list[str]:
    image = clients.ec2.describe_images()["Images"][0]["ImageId"]
    answer = clients.ec2.run_instances(
        ImageId=image, InstanceType="c7i.24xlarge", MinCount=count, MaxCount=count
    )
    return [instance["InstanceId"] for instance in answer["Instances"]]


def test_more_machines_than_a_filter_takes(clients: Clients, recorder: Recorder) -> None:
    ids = launch(clients, 203)

    running = wait_until_running(clients.ec2, ids, clock=FakeClock())

    assert [instance.id for instance in running] == ids
    asked = [len(f["Values"]) for call in recorder.of("DescribeInstances") for f in call["Filters"]]
    assert max(asked) == 200


def test_a_machine_that_died_at_its_start_is_named(clients: Clients) -> None:
    first, second = launch(clients, 2)
    clients.ec2.terminate_instances(InstanceIds=[second])

    with pytest.raises(CloudError, match=f"instance {second} is terminated"):
        wait_until_running(clients.ec2, [first, second], clock=FakeClock())


def test_what_was_given_back_twice_is_gone(clients: Clients) -> None:
    ids = launch(clients, 2)

    for _ in range(2):
        terminate_instances(clients.ec2, ids, FakeClock())

    assert (
        clients.ec2.describe_instances(
            Filters=[{"Name": "instance-state-name", "Values": ["running"]}]
        )["Reservations"]
        == []
    )
