"""Security group, subnets, and the support of instance types."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.stub import Stubber

from infra.ec2.inventory import describe_inventory
from infra.ec2.network import (
    Network,
    SecurityGroup,
    TypeSupport,
    create_placement_group,
    create_security_group,
    describe_networks,
    describe_type_support,
    open_security_group,
    require_offers,
)
from infra.errors import UsageError
from infra.instance_types import InstanceType
from tests.aws import Recorder
from tests.infra.local.fakes import FakeCloud
from tests.infra.plan_inputs import CALLER, make_spec

OTHER, MOVED = "198.51.100.0/24", "192.0.2.9/32"


@pytest.fixture
def group(ec2_cloud: FakeCloud) -> SecurityGroup:
    ec2 = ec2_cloud.clients.ec2
    vpc = describe_networks(ec2, (), None)[0].vpc_id
    return create_security_group(ec2, "bert", vpc, {"spr-cluster:nodes": "3"})


def see(cloud: FakeCloud) -> SecurityGroup:
    (found,) = describe_inventory(cloud.clients.ec2, "bert", ("security_groups",)).security_groups
    return found


def test_it_is_opened_for_the_caller_and_for_itself_alone(
    ec2_cloud: FakeCloud, ec2_calls: Recorder, group: SecurityGroup
) -> None:
    open_security_group(ec2_cloud.clients.ec2, group, [CALLER], CALLER)

    assert see(ec2_cloud).is_open_as([CALLER], CALLER)
    (ingress,) = ec2_calls.of("AuthorizeSecurityGroupIngress")
    (egress,) = ec2_calls.of("AuthorizeSecurityGroupEgress")
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group.id}]}
    ssh, itself = ingress["IpPermissions"]
    assert (ssh["IpProtocol"], ssh["FromPort"], ssh["ToPort"]) == ("tcp", 22, 22)
    assert [r["CidrIp"] for r in ssh["IpRanges"]] == [CALLER]
    assert itself == inside
    assert egress["IpPermissions"] == [inside]


def test_what_is_open_already_is_left_as_it_is(
    ec2_cloud: FakeCloud, ec2_calls: Recorder, group: SecurityGroup
) -> None:
    open_security_group(ec2_cloud.clients.ec2, group, [CALLER], CALLER)
    before = len(ec2_calls.calls)

    open_security_group(ec2_cloud.clients.ec2, see(ec2_cloud), [CALLER], CALLER)

    assert ec2_calls.operations()[before:] == ["DescribeSecurityGroups"]


@pytest.fixture(params=["default", "own"])
def open_group(ec2_cloud: FakeCloud, request: pytest.FixtureRequest) -> SecurityGroup:
    """A group that is open to CALLER, which is followed, and to OTHER, which was chosen."""
    ec2 = ec2_cloud.clients.ec2
    own = request.param == "own"
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"] if own else ""
    vpc = vpc or describe_networks(ec2, (), None)[0].vpc_id
    made = create_security_group(ec2, "bert", vpc, {"spr-cluster:nodes": "3"})
    open_security_group(ec2, made, [CALLER, OTHER], CALLER)
    return see(ec2_cloud)


def test_the_followed_address_is_closed_when_it_moves(
    ec2_cloud: FakeCloud, open_group: SecurityGroup
) -> None:
    """AWS revokes nothing if the description differs, and in a default VPC without an error."""
    open_security_group(ec2_cloud.clients.ec2, open_group, [OTHER, MOVED], MOVED)

    assert see(ec2_cloud).is_open_as([OTHER, MOVED], MOVED)


def test_what_another_command_changed_first_is_no_error(
    ec2_cloud: FakeCloud, open_group: SecurityGroup
) -> None:
    ec2 = ec2_cloud.clients.ec2
    # The other one closed one range, and opened one, of the two that this one is about to.
    open_security_group(ec2, open_group, [CALLER, MOVED], MOVED)

    open_security_group(ec2, open_group, [MOVED, "192.0.2.0/24"], MOVED)

    assert see(ec2_cloud).is_open_as([MOVED, "192.0.2.0/24"], MOVED)


def test_a_range_whose_origin_changes_is_described_anew(
    ec2_cloud: FakeCloud, open_group: SecurityGroup
) -> None:
    assert open_group.followed == {CALLER}
    for caller in ("", CALLER):
        assert not see(ec2_cloud).is_open_as([CALLER, OTHER], caller)

        open_security_group(ec2_cloud.clients.ec2, see(ec2_cloud), [CALLER, OTHER], caller)

        assert see(ec2_cloud).is_open_as([CALLER, OTHER], caller)


@pytest.mark.parametrize(
    "interrupted", ["AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"]
)
def test_opening_continues_after_an_interruption(
    ec2_cloud: FakeCloud, group: SecurityGroup, interrupted: str
) -> None:
    ec2 = ec2_cloud.clients.ec2
    ec2_cloud.faults(f'[[error]]\naction = "{interrupted}"\ncode = "UnauthorizedOperation"\n')
    with pytest.raises(Exception, match="UnauthorizedOperation"):
        open_security_group(ec2, group, [CALLER], CALLER)
    assert not see(ec2_cloud).is_open_as([CALLER], CALLER)

    open_security_group(ec2, see(ec2_cloud), [CALLER], CALLER)

    assert see(ec2_cloud).is_open_as([CALLER], CALLER)


SSH: dict[str, Any] = {
    "IpProtocol": "tcp",
    "FromPort": 22,
    "ToPort": 22,
    "IpRanges": [{"CidrIp": CALLER}],
}
ITSELF, ANOTHER = (
    {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": name}]} for name in ("sg-1", "sg-2")
)


@pytest.mark.parametrize(
    ("ingress", "egress", "open_"),
    [
        ([SSH, ITSELF], ITSELF, True),
        ([{**SSH, "IpRanges": [*SSH["IpRanges"], {"CidrIp": "0.0.0.0/0"}]}, ITSELF], ITSELF, False),
        ([{**SSH, "ToPort": 99}, ITSELF], ITSELF, False),
        ([{**SSH, "FromPort": 80, "ToPort": 80}, ITSELF], ITSELF, False),
        ([SSH, ANOTHER], ITSELF, False),
        ([SSH, ITSELF], ANOTHER, False),
    ],
)
def test_rules_are_read_as_ec2_tells_them(ingress: list[Any], egress: Any, open_: bool) -> None:
    rules = {"IpPermissions": ingress, "IpPermissionsEgress": [egress]}
    answer: Any = {"GroupId": "sg-1", **rules}

    assert SecurityGroup.from_aws(answer).is_open_as([CALLER], "") is open_


def test_a_placement_group_is_a_tight_one_and_tagged(
    ec2_cloud: FakeCloud, ec2_calls: Recorder
) -> None:
    create_placement_group(ec2_cloud.clients.ec2, "bert", {})

    (request,) = ec2_calls.of("CreatePlacementGroup")
    assert (request["GroupName"], request["Strategy"]) == ("spr-cluster-bert", "cluster")
    found = describe_inventory(ec2_cloud.clients.ec2, "bert", ("placement_groups",))
    assert found.ids() == {"placement_groups": ["spr-cluster-bert"]}


def test_the_default_subnet_of_every_zone_in_their_order(ec2_cloud: FakeCloud) -> None:
    ec2 = ec2_cloud.clients.ec2

    networks = describe_networks(ec2, (), None)

    assert [network.zone for network in networks] == [f"us-east-1{z}" for z in "abcdef"]
    wished = networks[3]
    assert describe_networks(ec2, (wished.subnet_id,), None) == [wished]
    assert describe_networks(ec2, (), wished.vpc_id) == networks
    assert describe_networks(ec2, (), "vpc-of-somebody-else") == []


def test_subnets_of_several_vpcs_are_refused(ec2_cloud: FakeCloud) -> None:
    ec2 = ec2_cloud.clients.ec2
    found: list[Any] = [
        {"VpcId": f"vpc-{n}", "SubnetId": f"subnet-{n}", "AvailabilityZone": "a"} for n in "12"
    ]
    stub = Stubber(ec2)
    stub.add_response("describe_subnets", {"Subnets": found})
    with stub, pytest.raises(UsageError, match="subnet-1 in vpc-1, subnet-2 in vpc-2"):
        describe_networks(ec2, ("subnet-1", "subnet-2"), None)


def test_a_subnet_of_a_vpc_with_dedicated_tenancy_is_refused(ec2_cloud: FakeCloud) -> None:
    ec2 = ec2_cloud.clients.ec2
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16", InstanceTenancy="dedicated")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/24")["Subnet"]["SubnetId"]

    with pytest.raises(UsageError, match=f"{subnet}: {vpc} has dedicated tenancy") as caught:
        describe_networks(ec2, (subnet,), None)
    assert caught.value.hint == "choose a subnet of another VPC"


def test_a_types_zones_are_asked_and_one_that_is_not_offered_is_left_out(
    ec2_cloud: FakeCloud,
) -> None:
    ec2 = ec2_cloud.clients.ec2

    support = describe_type_support(ec2, ["r7iz.metal-16xl", "x9z.metal"])

    assert set(support) == {"r7iz.metal-16xl"}
    assert support["r7iz.metal-16xl"].zones <= {f"us-east-1{zone}" for zone in "abcdef"}
    assert support["r7iz.metal-16xl"].cluster_groups
    assert describe_type_support(ec2, ["x9z.metal"]) == {}


_SIZE = {
    "VCpuInfo": {"DefaultVCpus": 4, "DefaultCores": 2},
    "MemoryInfo": {"SizeInMiB": 8192},
    "ProcessorInfo": {"SupportedArchitectures": ["x86_64"], "Manufacturer": "Intel"},
}
_T = InstanceType("t", 4, 2, None, 8, None, None)


class TypesOfEc2:
    """EC2's two answers about types, page by page."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._pages: dict[str, Any] = {
            "describe_instance_type_offerings": [
                {"InstanceTypeOfferings": [{"InstanceType": "t", "Location": "a"}]},
                {"InstanceTypeOfferings": [{"InstanceType": "t", "Location": "b"}]},
            ],
            "describe_instance_types": [
                {"InstanceTypes": [{"InstanceType": "t", **_SIZE, **info}]}
            ],
        }

    def get_paginator(self, operation: str) -> Any:
        self._next = self._pages[operation]
        return self

    def paginate(self, **_: Any) -> Any:
        return self._next


@pytest.mark.parametrize(
    ("info", "ena_express", "groups"),
    [
        ({}, False, True),
        ({"NetworkInfo": {"EnaSrdSupported": True}}, True, True),
        ({"PlacementGroupInfo": {"SupportedStrategies": ["spread"]}}, False, False),
        ({"PlacementGroupInfo": {"SupportedStrategies": ["spread", "cluster"]}}, False, True),
    ],
)
def test_what_a_type_can_do_is_ec2s_word(
    info: dict[str, Any], ena_express: bool, groups: bool
) -> None:
    client: Any = TypesOfEc2(info)

    support = describe_type_support(client, ["t"])

    machine = InstanceType("t", 4, 2, None, 8, None, None, amx=None)
    assert support == {"t": TypeSupport(frozenset("ab"), ena_express, groups, machine)}


def test_a_type_with_gpus_is_refused() -> None:
    client: Any = TypesOfEc2({"GpuInfo": {"Gpus": []}})
    spec = make_spec(2, instance_types=("c9i.large",))

    support = describe_type_support(client, ["t"])

    with pytest.raises(UsageError, match=r"^t: it has GPUs, which this tool does not use\n"):
        require_offers(spec, support, (), "us-east-1")


@pytest.mark.parametrize(
    ("name", "manufacturer", "amx"),
    [
        ("c7i.8xlarge", "Intel", True),
        ("m7i-flex.large", "Intel", True),
        ("r8id.24xlarge", "Intel", True),
        ("m6i.large", "Intel", False),
        ("x2iezn.metal", "Intel", False),
        ("c7a.large", "AMD", False),
        ("c8in.metal-48xl", "Intel", None),
        ("u7i-12tb.224xlarge", "Intel", None),
        ("c6i.16xlarge", "Intel", False),
    ],
)
def test_amx_is_told_by_the_table_then_the_generation(
    name: str, manufacturer: str, amx: bool | None
) -> None:
    processor = {"SupportedArchitectures": ["x86_64"], "Manufacturer": manufacturer}
    info = {**_SIZE, "InstanceType": name, "ProcessorInfo": processor}

    assert InstanceType.from_aws(info).amx is amx


def test_subnets_in_other_zones_than_the_types_are_of_no_use() -> None:
    support = {"r7iz.metal-16xl": TypeSupport(frozenset({"us-east-1a"}))}
    networks = (Network("vpc-1", "subnet-b", "us-east-1b"),)

    zone = r"no default subnet: not in a zone that offers r7iz.metal-16xl \(us-east-1a\)"
    with pytest.raises(UsageError, match=zone):
        require_offers(make_spec(2), support, networks, "us-east-1")
