"""The way to a subnet: its route table, the internet gateway, and VPC Block Public Access."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infra.aws.cloud import probe_ssh
from infra.ec2.network import Network
from infra.ec2.routes import describe_ways, require_jump, require_s3, require_ways
from infra.errors import UsageError
from tests.infra.plan_inputs import make_spec

A, B = Network("vpc-1", "subnet-a", "us-east-1a"), Network("vpc-1", "subnet-b", "us-east-1b")
INTERNET = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-1", "State": "active"}
NAT = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1", "State": "active"}
LOCAL = {"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local", "State": "active"}


GATEWAY = {"DestinationPrefixListId": "pl-1", "GatewayId": "vpce-1", "State": "active"}


def table(name: str, *routes: Any, subnet: str = "", owner: str = "1") -> Any:
    """A route table: a subnet's own, or the main one of the VPC."""
    association = {"SubnetId": subnet, "Main": False} if subnet else {"Main": True}
    return {
        "RouteTableId": name,
        "VpcId": "vpc-1",
        "OwnerId": owner,
        "Associations": [association],
        "Routes": [LOCAL, *routes],
    }


class Ec2:
    """EC2 with these route tables, and this mode of Block Public Access."""

    meta = type("Meta", (), {"region_name": "us-east-1"})

    def __init__(
        self, *tables: Any, mode: str = "off", exclusions: Any = (), endpoints: Any = ()
    ) -> None:
        self._tables, self._mode, self._exclusions = tables, mode, exclusions
        self._endpoints = list(endpoints)

    def get_paginator(self, operation: str) -> Any:
        assert operation in {"describe_route_tables", "describe_vpc_endpoints"}
        return self

    def paginate(self, **_: Any) -> Any:
        pages: list[Any] = [{"RouteTables": [one], "VpcEndpoints": []} for one in self._tables]
        pages[0]["VpcEndpoints"] = self._endpoints
        return pages

    def describe_vpc_block_public_access_options(self) -> Any:
        return {"VpcBlockPublicAccessOptions": {"InternetGatewayBlockMode": self._mode}}

    def describe_vpc_block_public_access_exclusions(self) -> Any:
        return {"VpcBlockPublicAccessExclusions": list(self._exclusions)}


def clients_of(ec2: Any) -> Any:
    return SimpleNamespace(ec2=ec2, caller=SimpleNamespace(account="1"))


def usable(ec2: Any, *, installs: bool = True, **options: Any) -> list[str]:
    spec = make_spec(**options)
    left = require_ways(clients_of(ec2), [A, B], pytest.fail, spec, installs=installs)
    return [network.subnet_id for network in left]


IPV6 = {"DestinationIpv6CidrBlock": "::/0", "GatewayId": "igw-1", "State": "active"}


@pytest.mark.parametrize(
    ("routes", "public", "target"),
    [
        ([INTERNET], True, "igw-1"),
        ([NAT], False, "nat-1"),
        ([{**INTERNET, "State": "blackhole"}], False, ""),
        ([IPV6], False, ""),
        # A company's own addresses may have a way of their own.
        ([NAT, {**INTERNET, "DestinationCidrBlock": "203.0.113.0/24"}], True, "nat-1"),
    ],
)
def test_a_subnet_is_public_by_its_active_route(
    routes: list[Any], public: bool, target: str
) -> None:
    client: Any = Ec2(table("rtb-main", *routes))

    way = describe_ways(client, [A])["subnet-a"]

    assert (way.table_id, way.is_public, way.target) == ("rtb-main", public, target)
    assert way.leads_out is (target == "nat-1")


def test_private_machines_need_a_way_out_only_to_install() -> None:
    ec2 = Ec2(table("rtb-nat", NAT, subnet="subnet-b"), table("rtb-main", INTERNET))

    assert usable(ec2) == ["subnet-a"]  # a subnet's own table comes before the main one
    assert usable(ec2, private=True) == ["subnet-b"]
    assert usable(Ec2(table("rtb-main")), private=True, installs=False) == ["subnet-a", "subnet-b"]
    with pytest.raises(UsageError, match=r"rtb-main sends 0\.0\.0\.0/0 to igw-1; its machines"):
        usable(Ec2(table("rtb-main", INTERNET)), private=True)


def excluded(
    resource: str, mode: str = "allow-bidirectional", state: str = "create-complete"
) -> Any:
    arn = f"arn:aws:ec2:us-east-1:123456789012:{resource}"
    return {"ResourceArn": arn, "InternetGatewayExclusionMode": mode, "State": state}


BOTH, PRIVATE = ["subnet-a", "subnet-b"], {"private": True}
RUNS = {**PRIVATE, "installs": False}
TRANSIT = {**INTERNET, "GatewayId": "", "TransitGatewayId": "tgw-1"}
IN, ALL = "block-ingress", "block-bidirectional"
REACHED = "be reached at a public"


@pytest.mark.parametrize(
    ("route", "mode", "exclusion", "options", "left"),
    [
        (INTERNET, IN, excluded("vpc/vpc-1"), {}, BOTH),
        (INTERNET, IN, excluded("subnet/subnet-b"), {}, ["subnet-b"]),
        (INTERNET, IN, excluded("vpc/vpc-1", mode="allow-egress"), {}, REACHED),
        (INTERNET, IN, excluded("vpc/vpc-1", state="delete-complete"), {}, REACHED),
        (INTERNET, IN, excluded("vpc/vpc-2"), {"installs": False}, REACHED),
        (NAT, ALL, None, PRIVATE, "install software over a NAT gateway"),
        (NAT, ALL, None, RUNS, BOTH),
        (NAT, ALL, None, {**RUNS, "jump": "ssm"}, "reach Session Manager over"),
        (NAT, IN, None, PRIVATE, BOTH),
        (NAT, ALL, excluded("subnet/subnet-b", mode="allow-egress"), PRIVATE, ["subnet-b"]),
        (NAT, ALL, excluded("vpc/vpc-1"), PRIVATE, BOTH),
        # Another account may own the exit.
        (TRANSIT, ALL, None, PRIVATE, BOTH),
    ],
)
def test_block_public_access_closes_what_it_does_not_exclude(
    route: Any, mode: str, exclusion: Any, options: dict[str, Any], left: list[str] | str
) -> None:
    exclusions = (exclusion,) if exclusion else ()
    ec2 = Ec2(table("rtb-main", route), mode=mode, exclusions=exclusions)
    if isinstance(left, list):
        assert usable(ec2, **options) == left
        return
    with pytest.raises(UsageError, match=f"is {mode} .* can't {left}") as caught:
        usable(ec2, **options)
    assert ("--private" in str(caught.value.hint)) is (route is INTERNET)


@pytest.mark.parametrize("target", [{"GatewayId": "vpce-1"}, {"NetworkInterfaceId": "eni-1"}])
def test_a_way_through_a_firewall_is_noted_and_taken_if_there_is_no_other(target: Any) -> None:
    through = {"DestinationCidrBlock": "0.0.0.0/0", "State": "active", **target}
    notes, main = list[str](), table("rtb-main", through)
    ec2 = Ec2(main, table("rtb-own", subnet="subnet-b"))

    assert require_ways(clients_of(ec2), [A, B], notes.append, make_spec()) == [A]
    (note,), (name,) = notes, target.values()
    assert f"subnet-a goes through a firewall endpoint, {name}; the firewall may block SSH" in note
    assert usable(Ec2(main, table("rtb-own", INTERNET, subnet="subnet-b"))) == ["subnet-b"]


def endpoint(service: str, kind: str, *tables: str, state: str = "available") -> Any:
    found = {"ServiceName": f"com.amazonaws.us-east-1.{service}", "VpcEndpointType": kind}
    return {**found, "State": state, "RouteTableIds": tables, "VpcEndpointId": "vpce-1"}


@pytest.mark.parametrize(
    ("routes", "endpoints", "left", "says"),
    [
        ([], (), [], "has no route for 0.0.0.0/0; its machines can't reach S3"),
        ([INTERNET], (), [], "its machines can't reach S3"),
        ([], (endpoint("s3", "Gateway", "rtb-main"),), ["subnet-a"], ""),
        ([], (endpoint("s3", "Gateway", "rtb-own"),), ["subnet-b"], ""),
        ([], (endpoint("s3", "Gateway", "rtb-main", state="pending"),), [], "can't reach S3"),
        ([], (endpoint("dynamodb", "Gateway", "rtb-main"),), [], "can't reach S3"),
        ([], (endpoint("s3", "Interface"),), ["subnet-a", "subnet-b"], ""),
        ([NAT], (), ["subnet-a"], "goes through nat-1, which costs about $0.045 per GB"),
        ([NAT], (endpoint("s3", "Gateway", "rtb-main"),), ["subnet-a"], ""),
        ([GATEWAY], (), ["subnet-a"], ""),  # another account's, which is not listed
        ([NAT, GATEWAY | {"GatewayId": "vgw-1"}], (), ["subnet-a"], "goes through nat-1"),
        ([GATEWAY], (endpoint("dynamodb", "Gateway", "rtb-main"),), [], "can't reach S3"),
    ],
)
def test_private_machines_need_a_way_to_s3(
    routes: list[Any], endpoints: tuple[Any, ...], left: list[str], says: str
) -> None:
    tables = table("rtb-main", *routes), table("rtb-own", subnet="subnet-b")
    clients = clients_of(Ec2(*tables, endpoints=endpoints))
    notes: list[str] = []

    def look(**options: Any) -> list[str]:
        left = require_s3(clients, [A, B], notes.append, make_spec(**options))
        return [network.subnet_id for network in left]

    private: dict[str, Any] = {"private": True, "read_from": ("s3://team",)}
    if left:
        assert look(**private) == left
        assert says in "".join(notes)
        assert bool(says) == bool(notes)
    else:
        way_out = "--service-name com.amazonaws.us-east-1.s3 --route-table-ids rtb-main"
        with pytest.raises(UsageError, match=f"(?s){says}.*{way_out}"):
            look(**private)
    assert look(private=True) == look(bucket="s3://team") == ["subnet-a", "subnet-b"]


def test_in_a_shared_vpc_what_endpoints_serve_is_noted_as_unknown() -> None:
    clients, notes = clients_of(Ec2(table("rtb-main", owner="2"))), list[str]()
    spec = make_spec(private=True, jump="ssm", bucket="s3://team")

    assert require_ways(clients, [A, B], notes.append, spec, installs=False) == [A, B]
    assert require_s3(clients, [A, B], notes.append, spec) == [A, B]
    unknown = "Can't check whether machines in subnet-a reach {}: account 2 owns the VPC and its endpoints."
    assert notes == [unknown.format(what) for what in ("Session Manager", "S3")]


def test_an_endpoint_serves_unless_it_is_new_or_deleted() -> None:
    spec = make_spec(private=True, jump="eice")

    def look(state: str) -> None:
        endpoint = {"InstanceConnectEndpointId": "eice-1", "State": state}
        pages = SimpleNamespace(paginate=lambda **_: [{"InstanceConnectEndpoints": [endpoint]}])
        ec2 = SimpleNamespace(meta=Ec2.meta, get_paginator=lambda _: pages)
        require_jump(cast("Any", SimpleNamespace(ec2=ec2)), spec, [A], pytest.fail)

    for state in ("create-complete", "update-in-progress", "update-complete", "update-failed"):
        look(state)
    for state in ("create-in-progress", "delete-failed"):
        with pytest.raises(UsageError, match=f"that is ready: eice-1 is {state}"):
            look(state)


def test_the_way_out_to_port_22_is_tried_at_two_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr("infra.aws.cloud._SSH_PORT", port)
        monkeypatch.setattr("infra.aws.cloud._SSH_SERVICE", "127.0.0.1")
        assert probe_ssh("eu-west-1") == ""
    assert probe_ssh("eu-west-1").startswith("127.0.0.1: ")
    # A name that does not exist says nothing about port 22.
    monkeypatch.setattr("infra.aws.cloud._SSH_SERVICE", "nowhere.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", _unknown_name)
    assert probe_ssh("eu-west-1") == ""


def _unknown_name(*_: Any, **__: Any) -> Any:
    raise socket.gaierror("unknown")
