"""What surrounds a cluster that exists, and what it was created with: repaired, kept, never overwritten."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from infra.ec2 import tags
from infra.errors import SprError, UsageError
from infra.plan.actions import ActionKind
from tests.harness.cloud import CALLER
from tests.harness.simulated_cloud import SimulatedCloud

HOUR = timedelta(hours=1)


def ssh_cidrs(simulated_cloud: SimulatedCloud) -> tuple[str, ...]:
    group = simulated_cloud.found("security_groups").group
    assert group is not None
    return group.ssh_cidrs


def test_another_address_of_the_caller_is_let_in_and_the_old_one_no_more(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=1)

    simulated_cloud.faults('[network]\ncaller = "198.51.100.9/32"\n')
    simulated_cloud.up()

    assert ssh_cidrs(simulated_cloud) == ("198.51.100.9/32",)


def test_a_wider_range_stays_for_a_caller_in_it_until_another_is_named(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.up("203.0.113.0/24", nodes=1)
    simulated_cloud.faults('[network]\ncaller = "203.0.113.99/32"\n')

    assert not simulated_cloud.plan().changes
    simulated_cloud.up()
    assert ssh_cidrs(simulated_cloud) == ("203.0.113.0/24",)
    simulated_cloud.up("203.0.113.99/32")
    assert ssh_cidrs(simulated_cloud) == ("203.0.113.99/32",)


def test_deleted_rules_are_restored(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1)
    group = simulated_cloud.ec2.describe_security_groups(
        Filters=[{"Name": "group-name", "Values": ["spr-cluster-bert"]}]
    )["SecurityGroups"][0]
    simulated_cloud.ec2.revoke_security_group_ingress(
        GroupId=group["GroupId"], IpPermissions=group["IpPermissions"]
    )

    plan = simulated_cloud.plan()
    assert [action.kind for action in plan.actions] == [
        ActionKind.RECORD,
        ActionKind.OPEN_GROUP,
        ActionKind.VERIFY,
    ]
    simulated_cloud.up()
    repaired = simulated_cloud.found("security_groups").group
    assert repaired is not None
    assert repaired.is_open_as([CALLER], CALLER)


def test_a_key_deleted_in_ec2_is_imported_again(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1)
    simulated_cloud.ec2.delete_key_pair(KeyName="spr-cluster-bert")
    key = simulated_cloud.ctx.files.key.read_text()

    simulated_cloud.up(nodes=2)

    assert simulated_cloud.cluster().is_whole
    assert simulated_cloud.ctx.files.key.read_text() == key


def test_the_time_to_live_stays_as_it_was_set(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1, ttl=2 * HOUR)
    simulated_cloud.clock.sleep(3000)

    simulated_cloud.up(nodes=1, ttl=9 * HOUR)

    group = simulated_cloud.found("security_groups").group
    assert group is not None
    assert group.tags[tags.EXPIRES] == simulated_cloud.expires(2 * HOUR)


def test_over_it_is_refused_while_machines_end_and_then_begins_anew(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=1, ttl=2 * HOUR)
    simulated_cloud.clock.sleep(2 * 3600)
    before = simulated_cloud.writes()
    with pytest.raises(
        SprError, match=r"its nodes wait for `fetch` until .*, and start nothing new"
    ):
        simulated_cloud.up(nodes=1)
    simulated_cloud.clock.sleep(1800)
    with pytest.raises(SprError, match="the time to live of cluster 'bert' is over") as caught:
        simulated_cloud.up(nodes=1)
    assert "in two minutes, `spr-cluster up --name bert` creates a new one" in str(caught.value)
    assert simulated_cloud.writes() == before

    simulated_cloud.end(simulated_cloud.found("instances").alive[0].id)
    again = simulated_cloud.clock.now
    simulated_cloud.up(nodes=1)

    group = simulated_cloud.found("security_groups").group
    assert group is not None
    end = tags.parse_time(group.tags[tags.EXPIRES]).timestamp()
    assert int(again) <= end - 2 * 3600 < again + 3600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stack": "intel"}, "--stack intel: cluster 'bert' was created with upstream"),
        ({"volume_gib": 500}, "--volume-gib 500: cluster 'bert' was created with 100"),
        (
            {"instance_types": ("m7i.metal-24xl",)},
            "the machines of cluster 'bert' are r7iz.metal-16xl",
        ),
    ],
)
def test_an_option_that_a_cluster_cannot_change_is_refused(
    simulated_cloud: SimulatedCloud, options: dict[str, Any], message: str
) -> None:
    simulated_cloud.prepared(nodes=1)
    before = simulated_cloud.writes()

    with pytest.raises(UsageError, match=message):
        simulated_cloud.up(**options)
    assert simulated_cloud.writes() == before


def test_a_name_in_use_is_waited_for_in_pauses(simulated_cloud: SimulatedCloud) -> None:
    error = 'action = "CreateSecurityGroup"\ncode = "InvalidGroup.Duplicate"\ntimes = 99\n'
    simulated_cloud.faults(f"[[error]]\n{error}")
    with pytest.raises(SprError, match="the cluster did not come up"):
        simulated_cloud.up(nodes=1)
    assert simulated_cloud.clock.now - simulated_cloud.began > 60


def test_a_damaged_record_is_named_and_down_still_works(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=1)
    group = simulated_cloud.found("security_groups").group
    assert group is not None
    simulated_cloud.ec2.create_tags(
        Resources=[group.id], Tags=[{"Key": "spr-cluster:nodes", "Value": "lots"}]
    )

    with pytest.raises(SprError, match="invalid cluster record"):
        simulated_cloud.up()
    simulated_cloud.down()
    assert simulated_cloud.left() == []


def test_the_key_of_another_clouds_cluster_is_never_overwritten(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=1)
    key = simulated_cloud.ctx.files.key.read_text()
    elsewhere = simulated_cloud.seen_as(name="aws", region="eu-west-1")

    with pytest.raises(
        UsageError, match="has the key of another cluster 'bert', in local us-east-1"
    ):
        elsewhere.up(nodes=1)
    assert simulated_cloud.ctx.files.key.read_text() == key
