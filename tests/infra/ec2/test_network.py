"""Security group, subnets, and the support of instance types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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


def test_it_is_opened_once_for_the_caller_and_for_itself_alone(
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
    assert [itself] == [inside] == egress["IpPermissions"]
    create_placement_group(ec2_cloud.clients.ec2, "bert", {})
    (request,) = ec2_calls.of("CreatePlacementGroup")
    assert (request["GroupName"], request["Strategy"]) == ("spr-cluster-bert", "cluster")
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
    ec2 = ec2_cloud.clients.ec2
    assert open_group.followed == {CALLER}
    # A range whose origin changes gets a new description.
    for caller in ("", CALLER):
        assert not see(ec2_cloud).is_open_as([CALLER, OTHER], caller)
        open_security_group(ec2, see(ec2_cloud), [CALLER, OTHER], caller)
        assert see(ec2_cloud).is_open_as([CALLER, OTHER], caller)

    before = see(ec2_cloud)
    open_security_group(ec2, before, [CALLER, MOVED], MOVED)
    assert see(ec2_cloud).is_open_as([CALLER, MOVED], MOVED)
    # Another command closed one range, and opened one, of the two that this one is about to.
    open_security_group(ec2, before, [MOVED, "192.0.2.0/24"], MOVED)
    assert see(ec2_cloud).is_open_as([MOVED, "192.0.2.0/24"], MOVED)


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


_FROM: list[Any] = [{"CidrIp": CALLER}]
SSH: dict[str, Any] = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": _FROM}
ITSELF, ANOTHER = (
    {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": name}]} for name in ("sg-1", "sg-2")
)


@pytest.mark.parametrize(
    ("ingress", "egress", "open_"),
    [
        ([SSH, ITSELF], ITSELF, True),
        ([{**SSH, "IpRanges": [*_FROM, {"CidrIp": "0.0.0.0/0"}]}, ITSELF], ITSELF, False),
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


def test_the_default_subnet_of_every_zone_and_the_zones_of_a_type(
    ec2_cloud: FakeCloud,
) -> None:
    ec2 = ec2_cloud.clients.ec2

    networks = describe_networks(ec2, (), None)

    assert [network.zone for network in networks] == [f"us-east-1{z}" for z in "abcdef"]
    wished = networks[3]
    assert describe_networks(ec2, (wished.subnet_id,), None) == [wished]
    assert describe_networks(ec2, (), wished.vpc_id) == networks
    assert describe_networks(ec2, (), "vpc-of-somebody-else") == []
    # A type that the region does not offer is left out.
    support = describe_type_support(ec2, ["r7iz.metal-16xl", "x9z.metal"])
    assert set(support) == {"r7iz.metal-16xl"}
    assert support["r7iz.metal-16xl"].zones <= {network.zone for network in networks}
    assert describe_type_support(ec2, ["x9z.metal"]) == {}


def test_subnets_of_several_vpcs_with_dedicated_tenancy_or_without_ipv4_are_refused(
    ec2_cloud: FakeCloud,
) -> None:
    ec2 = ec2_cloud.clients.ec2
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16", InstanceTenancy="dedicated")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/24")["Subnet"]["SubnetId"]
    other = describe_networks(ec2, (), None)[0]

    with pytest.raises(UsageError, match=f"{subnet}: {vpc} has dedicated tenancy") as caught:
        describe_networks(ec2, (subnet,), None)
    assert caught.value.hint == "choose a subnet of another VPC"
    with pytest.raises(UsageError, match="a cluster is in one VPC; these are in several") as caught:
        describe_networks(ec2, (subnet, other.subnet_id), None)
    for id_, place in ((subnet, vpc), (other.subnet_id, other.vpc_id)):
        assert f"{id_} in {place}" in caught.value.message

    def lose_ipv4(parsed: Any, **_: object) -> None:
        for each in parsed["Subnets"]:
            each["Ipv6Native"] = each["SubnetId"] == other.subnet_id

    ec2.meta.events.register("after-call.ec2.DescribeSubnets", lose_ipv4)
    said = f"{other.subnet_id}: machines there have no IPv4 addresses"
    with pytest.raises(UsageError, match=said):
        describe_networks(ec2, (other.subnet_id,), None)
    # The default subnets of other zones are still of use.
    zones = {network.zone for network in describe_networks(ec2, (), None)}
    assert (len(zones), other.zone in zones) == (5, False)


_SIZE = {
    "VCpuInfo": {"DefaultVCpus": 4, "DefaultCores": 2},
    "MemoryInfo": {"SizeInMiB": 8192},
    "ProcessorInfo": {"SupportedArchitectures": ["x86_64"], "Manufacturer": "Intel"},
}


def types_of_ec2(**info: Any) -> dict[str, TypeSupport]:
    """What EC2 says, page by page, of a type that it offers in two zones."""
    offered = [{"InstanceType": "t", "Location": zone} for zone in "ab"]
    pages = {
        "describe_instance_type_offerings": [{"InstanceTypeOfferings": [o]} for o in offered],
        "describe_instance_types": [{"InstanceTypes": [{"InstanceType": "t", **_SIZE, **info}]}],
    }

    def get_paginator(operation: str) -> Any:
        return SimpleNamespace(paginate=lambda **_: pages[operation])

    client: Any = SimpleNamespace(get_paginator=get_paginator)
    return describe_type_support(client, ["t"])


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
    machine = InstanceType("t", 4, 2, None, 8, None, None, amx=None)
    support = TypeSupport(frozenset("ab"), ena_express, groups, machine)

    assert types_of_ec2(**info) == {"t": support}


def test_a_type_with_gpus_is_refused() -> None:
    support, spec = types_of_ec2(GpuInfo={"Gpus": []}), make_spec(2, instance_types=("c9i.large",))

    with pytest.raises(UsageError, match=r"^t: it has GPUs, which this tool does not use\n"):
        require_offers(spec, support, (), "us-east-1")


def test_amx_is_told_by_the_table_then_the_generation() -> None:
    def look(name: str, manufacturer: str = "Intel") -> bool | None:
        processor = {"SupportedArchitectures": ["x86_64"], "Manufacturer": manufacturer}
        return InstanceType.from_aws(
            {**_SIZE, "InstanceType": name, "ProcessorInfo": processor}
        ).amx

    assert all(map(look, ("c7i.8xlarge", "m7i-flex.large", "r8id.24xlarge")))
    old = [look("m6i.large"), look("x2iezn.metal"), look("c7a.large", "AMD"), look("c6i.16xlarge")]
    assert old == [False] * 4
    assert [look("c8in.metal-48xl"), look("u7i-12tb.224xlarge")] == [None, None]


def test_subnets_in_other_zones_than_the_types_are_of_no_use() -> None:
    support = {"r7iz.metal-16xl": TypeSupport(frozenset({"us-east-1a"}))}
    networks = (Network("vpc-1", "subnet-b", "us-east-1b"),)

    zone = r"no default subnet: not in a zone that offers r7iz.metal-16xl \(us-east-1a\)"
    with pytest.raises(UsageError, match=zone):
        require_offers(make_spec(2), support, networks, "us-east-1")
