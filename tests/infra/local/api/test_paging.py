"""Results come in pages, if a call or the faults file says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.local.fakes import FakeCloud

_ACTIONS = {
    "describe_instances": "Reservations",
    "describe_instance_status": "InstanceStatuses",
    "describe_volumes": "Volumes",
    "describe_network_interfaces": "NetworkInterfaces",
    "describe_subnets": "Subnets",
    "describe_security_groups": "SecurityGroups",
    "describe_spot_instance_requests": "SpotInstanceRequests",
}


def launch(cloud: FakeCloud) -> None:
    for number in range(6):
        cloud.run(InstanceMarketOptions={"MarketType": "spot"})
        cloud.ec2.create_security_group(GroupName=f"g{number}", Description="d")


@pytest.mark.parametrize("faults", ["", "page_size = 2\n"])
def test_results_come_in_pages(ec2_cloud: FakeCloud, faults: str) -> None:
    launch(ec2_cloud)
    ec2 = ec2_cloud.ec2
    whole = {name: getattr(ec2, name)()[key] for name, key in _ACTIONS.items()}
    ec2_cloud.faults(faults)
    for name, key in _ACTIONS.items():
        more: dict[str, Any] = {} if faults else {"MaxResults": 5}
        first = getattr(ec2, name)(**more)
        assert len(first[key]) == more.get("MaxResults", 2)
        pages = list(ec2.get_paginator(name).paginate(**more))
        assert [item for page in pages for item in page[key]] == whole[name]
        assert "NextToken" not in pages[-1]


def test_named_resources_come_together(ec2_cloud: FakeCloud) -> None:
    ec2_cloud.faults("page_size = 1\n")
    ids = [subnet["SubnetId"] for page in _subnets(ec2_cloud) for subnet in page["Subnets"]]
    found = ec2_cloud.ec2.describe_subnets(SubnetIds=ids)
    assert len(found["Subnets"]) == len(ids) == 6
    assert len(ec2_cloud.ec2.describe_regions()["Regions"]) == 1


def _subnets(cloud: FakeCloud) -> Any:
    return cloud.ec2.get_paginator("describe_subnets").paginate()
