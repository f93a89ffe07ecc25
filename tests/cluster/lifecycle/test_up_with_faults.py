"""``up`` on a bad day: lost answers, throttling, and what EC2 shows late."""

from __future__ import annotations

import pytest

from tests.harness.simulated_cloud import SimulatedCloud


@pytest.mark.parametrize(
    ("action", "effect"),
    [
        ("CreateSecurityGroup", "true"),
        ("AuthorizeSecurityGroupIngress", "true"),
        ("ImportKeyPair", "true"),
        ("CreatePlacementGroup", "true"),
        ("RunInstances", "true"),
        ("RunInstances", "false"),
        ("CreateImage", "true"),
        ("CreateImage", "false"),
        ("CreateTags", "true"),
    ],
)
def test_a_call_that_ec2_does_not_answer_makes_nothing_twice(
    simulated_cloud: SimulatedCloud, action: str, effect: str
) -> None:
    simulated_cloud.faults(f'[[error]]\naction = "{action}"\ntimes = 1\neffect = {effect}\n')

    cluster = simulated_cloud.up(nodes=2)

    assert len(cluster.nodes) == 2
    found = simulated_cloud.found()
    assert found.counts() == (
        "2 instances, 2 volumes, 2 interfaces, 1 security group, 1 placement group, 1 key pair, "
        "1 image, 1 snapshot"
    )
    assert sum(len(ids) for ids in found.ids().values()) == len(simulated_cloud.left())


def test_the_workers_answer_lost_buys_them_once(simulated_cloud: SimulatedCloud) -> None:
    lost = '[[error]]\naction = "RunInstances"\ntimes = 3\nafter = 1\neffect = true\n'
    simulated_cloud.faults(lost)

    simulated_cloud.up(nodes=3)

    assert len(simulated_cloud.fake.backend.reservations) == 2
    assert len(simulated_cloud.purchases()) == 2
    assert len(simulated_cloud.recorder.of("RunInstances")) >= 5


def test_what_ec2_shows_late_is_waited_for(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.faults("visibility_s = 12")

    simulated_cloud.up(nodes=2)

    simulated_cloud.clock.sleep(12)
    assert simulated_cloud.cluster().is_whole
    assert len(simulated_cloud.found("instances").instances) == 2


def test_three_calls_of_ten_are_throttled_and_nothing_is_lost(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults('seed = 3\n[[throttle]]\naction = "*"\nrate = 0.3\n')

    simulated_cloud.up(nodes=2)

    simulated_cloud.faults("")
    assert simulated_cloud.cluster().is_whole
    assert len(simulated_cloud.left()) == 11


def test_what_comes_in_pages_is_found_on_all_of_them(simulated_cloud: SimulatedCloud) -> None:
    zone = simulated_cloud.first_zone()
    full = f'[[capacity]]\nzone = "{zone}"\nfree = 0\n'
    simulated_cloud.faults(f"page_size = 1\n{full}")

    cluster = simulated_cloud.up(nodes=2)

    assert zone not in {node.instance.zone for node in cluster.nodes}
    simulated_cloud.down()
    assert simulated_cloud.left() == []
