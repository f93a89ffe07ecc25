"""``up`` on a bad day: lost answers, throttling, and what EC2 shows late."""

from __future__ import annotations

import pytest

from tests.harness.simulated_cloud import SimulatedCloud

_CREATING = ("RunInstances", "CreateImage")


@pytest.mark.parametrize(
    ("actions", "effect"),
    [
        (
            (
                *("CreateSecurityGroup", "AuthorizeSecurityGroupIngress", "ImportKeyPair"),
                *("CreatePlacementGroup", "CreateTags", *_CREATING),
            ),
            "true",
        ),
        (_CREATING, "false"),
    ],
    ids=["done", "not done"],
)
def test_calls_that_ec2_does_not_answer_make_nothing_twice(
    cloud: SimulatedCloud, actions: tuple[str, ...], effect: str
) -> None:
    error = '[[error]]\naction = "{}"\ntimes = 1\neffect = {}\n'
    cloud.faults("".join(error.format(action, effect) for action in actions))

    cluster = cloud.up(nodes=2)

    assert {*actions} <= {*cloud.recorder.operations()}
    assert len(cluster.nodes) == 2
    found = cloud.found()
    assert found.counts() == (
        "2 instances, 2 volumes, 2 interfaces, 1 security group, 1 placement group, 1 key pair, "
        "1 image, 1 snapshot"
    )
    assert sum(len(ids) for ids in found.ids().values()) == len(cloud.left())


def test_what_comes_in_pages_is_found_on_all_of_them(cloud: SimulatedCloud) -> None:
    zone = cloud.first_zone()
    full = f'[[capacity]]\nzone = "{zone}"\nfree = 0\n'
    cloud.faults(f"page_size = 1\n{full}")

    cluster = cloud.up(nodes=2)

    assert zone not in {node.instance.zone for node in cluster.nodes}
    cloud.down()
    assert cloud.left() == []
