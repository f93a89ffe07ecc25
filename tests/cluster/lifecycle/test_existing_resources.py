"""The time to live of a cluster that exists: kept, and begun again only after its end."""

from __future__ import annotations

from datetime import timedelta

import pytest

from infra.ec2 import tags
from infra.errors import SprError
from tests.harness.simulated_cloud import SimulatedCloud

HOUR = timedelta(hours=1)


def test_over_it_is_refused_while_machines_end_and_then_begins_anew(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1, ttl=2 * HOUR)
    cloud.clock.sleep(3000)
    cloud.up(nodes=1, ttl=9 * HOUR)
    assert cloud.group.tags[tags.EXPIRES] == cloud.expires(2 * HOUR), "it stays as it was set"
    cloud.clock.sleep(2 * 3600 - 3000)
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
