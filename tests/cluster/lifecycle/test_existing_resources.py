"""What surrounds a cluster that exists, and what it was created with: repaired, kept, never overwritten."""

from __future__ import annotations

from datetime import timedelta

import pytest

from infra.ec2 import tags
from infra.errors import SprError
from tests.harness.simulated_cloud import SimulatedCloud

HOUR = timedelta(hours=1)


def test_a_wider_range_stays_for_a_caller_in_it_until_another_is_named(
    cloud: SimulatedCloud,
) -> None:
    cloud.up("203.0.113.0/24", nodes=1)
    cloud.faults('[network]\ncaller = "203.0.113.99/32"\n')

    assert not cloud.plan().changes
    cloud.up()
    assert cloud.group.ssh_cidrs == ("203.0.113.0/24",)
    cloud.up("203.0.113.99/32")
    assert cloud.group.ssh_cidrs == ("203.0.113.99/32",)


def test_the_time_to_live_stays_as_it_was_set(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1, ttl=2 * HOUR)
    cloud.clock.sleep(3000)

    cloud.up(nodes=1, ttl=9 * HOUR)

    group = cloud.group
    assert group.tags[tags.EXPIRES] == cloud.expires(2 * HOUR)


def test_over_it_is_refused_while_machines_end_and_then_begins_anew(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1, ttl=2 * HOUR)
    cloud.clock.sleep(2 * 3600)
    before = cloud.writes()
    with pytest.raises(
        SprError, match=r"its nodes wait for `fetch` until .*, and start nothing new"
    ):
        cloud.up(nodes=1)
    cloud.clock.sleep(1800)
    with pytest.raises(SprError, match="the time to live of cluster 'bert' is over") as caught:
        cloud.up(nodes=1)
    assert "in two minutes, `spr-cluster up --name bert` creates a new one" in str(caught.value)
    assert cloud.writes() == before
    cloud.clock.sleep(360)
    stuck = cloud.found("instances").alive[0].id
    with pytest.raises(SprError, match=f"{stuck} did not shut down and still runs"):
        cloud.up(nodes=1)

    cloud.end(cloud.found("instances").alive[0].id)
    again = cloud.clock.now
    cloud.up(nodes=1)

    group = cloud.group
    end = tags.parse_time(group.tags[tags.EXPIRES]).timestamp()
    assert int(again) <= end - 2 * 3600 < again + 3600


def test_a_name_in_use_is_waited_for_in_pauses(cloud: SimulatedCloud) -> None:
    error = 'action = "CreateSecurityGroup"\ncode = "InvalidGroup.Duplicate"\ntimes = 99\n'
    cloud.faults(f"[[error]]\n{error}")
    with pytest.raises(SprError, match="the cluster did not come up"):
        cloud.up(nodes=1)
    assert cloud.clock.now - cloud.began > 60
