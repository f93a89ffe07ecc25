"""The inventory of a cluster: every kind of resource, found by tag."""

from __future__ import annotations

from typing import Any

from infra.ec2.inventory import Inventory, describe_inventories, describe_inventory
from tests.aws import Recorder
from tests.infra.local.fakes import FakeCloud
from tests.infra.resource_factory import KINDS, ResourceFactory


def test_every_kind_is_looked_for_in_one_or_all_clusters(
    ec2_cloud: FakeCloud, ec2_calls: Recorder
) -> None:
    found = describe_inventory(ec2_cloud.clients.ec2, "bert")

    assert found == Inventory()
    assert not found
    operations = ec2_calls.operations()
    assert len(operations) == len(KINDS) == 9
    assert all(operation.startswith("Describe") for operation in operations)
    # Public images and snapshots of others are never ours.
    assert ec2_calls.of("DescribeImages")[0]["Owners"] == ["self"]
    (snapshots,) = ec2_calls.of("DescribeSnapshots")
    # AWS may refuse or time out long lists as a whole.
    assert (snapshots["OwnerIds"], snapshots["MaxResults"]) == (["self"], 1000)

    for name in ("zeta", "bert"):
        ResourceFactory(ec2_cloud, name).volumes()
    ResourceFactory(ec2_cloud, "bert").key_pairs()
    ec2_cloud.clients.ec2.create_key_pair(KeyName="of-nobody")
    before = len(ec2_calls.calls)
    clusters = describe_inventories(ec2_cloud.clients.ec2)
    counts = {name: inventory.counts() for name, inventory in clusters.items()}
    assert [*counts.items()] == [("bert", "1 volume, 1 key pair"), ("zeta", "1 volume")]
    assert len(ec2_calls.calls) - before == len(KINDS)


def test_a_machine_on_its_way_out_is_still_there_but_not_alive(ec2_cloud: FakeCloud) -> None:
    ec2_cloud.faults("terminate_s = 60")
    request = ResourceFactory(ec2_cloud, "bert").spot_requests()
    assert describe_inventory(ec2_cloud.clients.ec2, "bert").ids() == {"spot_requests": [request]}
    of_it: Any = {"Filters": [{"Name": "spot-instance-request-id", "Values": [request]}]}
    (asked,) = ec2_cloud.ec2.describe_spot_instance_requests(**of_it)["SpotInstanceRequests"]
    ec2_cloud.ec2.terminate_instances(InstanceIds=[asked["InstanceId"]])
    machine = ResourceFactory(ec2_cloud, "bert").instances()
    ec2_cloud.clients.ec2.terminate_instances(InstanceIds=[machine])

    found = describe_inventory(ec2_cloud.clients.ec2, "bert")

    assert found.ids() == {"instances": [machine]}
    assert found.alive == ()
    ec2_cloud.clock.sleep(61)
    assert not describe_inventory(ec2_cloud.clients.ec2, "bert")
