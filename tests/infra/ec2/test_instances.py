"""Instances: invisible ones, failed boots, terminations, and more ids than a filter takes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

import infra.ec2.instances
from infra.ec2 import tags
from infra.ec2.instances import (
    Instance,
    describe_impaired,
    describe_instances,
    describe_spot_notices,
    terminate_instances,
    wait_until_running,
    why_gone,
)
from infra.wait import BOOT_DEADLINE_S
from tests.aws import Recorder
from tests.infra.hasty_time import HastyTime
from tests.infra.local.fakes import FakeCloud
from tests.infra.plan_inputs import NOW, make_machine


def test_more_machines_than_a_filter_takes(
    ec2_cloud: FakeCloud, ec2_calls: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Filtering.html
    assert infra.ec2.instances._FILTER_VALUES <= 200
    monkeypatch.setattr(infra.ec2.instances, "_FILTER_VALUES", 3)
    ids = ec2_cloud.run(7)

    boot = wait_until_running(ec2_cloud.clients.ec2, ids, clock=ec2_cloud.clock)

    assert [instance.id for instance in boot.running] == ids
    assert boot.failed == {}
    filters = [f for call in ec2_calls.of("DescribeInstances") for f in call["Filters"]]
    asked = [len(f["Values"]) for f in filters if f["Name"] == "instance-id"]
    assert asked == [3, 3, 1]


def test_a_machine_that_never_boots_is_waited_for_forty_minutes_and_named(
    ec2_cloud: FakeCloud,
) -> None:
    ec2_cloud.faults('[[machine]]\nn = 0\nfate = "never-boots"\n')
    ids, clock, notes = ec2_cloud.run(3), ec2_cloud.clock, list[str]()
    assert isinstance(clock, HastyTime)
    clock.pace, begin = 20, clock.now

    boot = wait_until_running(
        ec2_cloud.clients.ec2, ids, clock=clock, on_wait=lambda _, states: notes.append(states)
    )

    assert boot.failed == {ids[0]: "pending: boot timed out after 40 min"}
    assert [machine.id for machine in boot.running] == ids[1:]
    assert BOOT_DEADLINE_S <= clock.now - begin < BOOT_DEADLINE_S + 600
    assert notes[-1] == f"1 pending, 2 running ({ids[0]})"


def test_what_was_given_back_twice_is_gone_and_about_no_machine_nothing_is_asked(
    ec2_cloud: FakeCloud, ec2_calls: Recorder
) -> None:
    ids, ec2 = ec2_cloud.run(2), ec2_cloud.clients.ec2
    for _ in range(2):
        terminate_instances(ec2, ids, ec2_cloud.clock)
    assert describe_instances(ec2, []) == ()

    before = len(ec2_calls.calls)
    terminate_instances(ec2, [], ec2_cloud.clock)
    assert describe_spot_notices(ec2, [make_machine(1)]) == {}
    assert len(ec2_calls.calls) == before


def test_impaired_machines_of_ours_are_found_among_all_others(ec2_cloud: FakeCloud) -> None:
    ec2_cloud.faults('[[machine]]\nfate = "impaired"\n')
    mine, other = ec2_cloud.run(2)
    ec2_cloud.faults("")
    (good,) = ec2_cloud.run(1)
    ec2 = ec2_cloud.clients.ec2

    assert describe_impaired(ec2, [mine, good]) == {mine}
    assert describe_impaired(ec2, [good]) == frozenset()
    assert describe_impaired(ec2, [mine, other]) == {mine, other}


def test_a_spot_notice_keeps_ec2s_message_also_for_more_machines_than_a_filter_takes(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infra.ec2.instances, "_FILTER_VALUES", 3)
    ec2_cloud.faults('[[machine]]\nfate = "spot-notice"\n')
    ids = ec2_cloud.run(5, InstanceMarketOptions={"MarketType": "spot"})
    ec2_cloud.faults("")
    ec2_cloud.run(2, InstanceMarketOptions={"MarketType": "spot"})
    ec2 = ec2_cloud.clients.ec2

    notices = describe_spot_notices(ec2, describe_instances(ec2, []))

    assert notices == dict.fromkeys(ids, "Your Spot instance is marked for termination.")


@pytest.mark.parametrize(
    ("state", "started_h", "hours", "stopped_h", "restarted"),
    [
        ("running", 0, 10, 0, False),
        ("running", 8, 10, 0, True),
        ("stopped", 0, 3, 7, False),
        ("stopped", 2, 3, 7, True),
    ],
)
def test_a_machine_counts_from_its_purchase_until_it_was_stopped(
    state: str, started_h: float, hours: float, stopped_h: float, *, restarted: bool
) -> None:
    stop = f"User initiated ({NOW + timedelta(hours=3):%Y-%m-%d %H:%M:%S} GMT)"
    described: Any = {
        "InstanceId": "i-1",
        "State": {"Name": state},
        "LaunchTime": NOW + timedelta(hours=started_h),
        "InstanceType": "r7iz.metal-16xl",
        "NetworkInterfaces": [
            {"Attachment": {"DeviceIndex": 1, "AttachTime": NOW + timedelta(hours=1)}},
            {"Attachment": {"DeviceIndex": 0, "AttachTime": NOW}},
        ],
        "StateTransitionReason": stop if state == "stopped" else "",
    }
    machine, now = Instance.from_aws(described), NOW + timedelta(hours=10)

    assert (machine.hours(now), machine.stopped_hours(now)) == (hours, stopped_h)
    assert machine.hours(NOW - timedelta(hours=2)) == 0
    assert machine.was_restarted is restarted
    # Somebody has edited the tags.
    described["Tags"] = [{"Key": tags.EXPIRES, "Value": "tomorrow"}]
    assert Instance.from_aws(described).expires is None


def test_why_a_machine_will_never_answer_again(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec2 = ec2_cloud.clients.ec2
    (there,) = ec2_cloud.run(1)
    wait_until_running(ec2, [there], clock=ec2_cloud.clock)
    assert why_gone(ec2, there) == ""
    terminate_instances(ec2, [there], clock=ec2_cloud.clock)
    assert why_gone(ec2, there).startswith(f"{there} is terminated")
    assert why_gone(ec2, "i-0a") == "EC2 no longer lists i-0a"

    def refuse(*_: object) -> None:
        raise EndpointConnectionError(endpoint_url="ec2")

    monkeypatch.setattr(infra.ec2.instances, "describe_by_id", refuse)
    assert why_gone(ec2, there) == ""
