"""Checks that this machine can reach a subnet: routes, VPC Block Public Access, and ``--jump``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from infra.aws.clients import DENIED, Clients, error_code
from infra.ec2.network import Network
from infra.errors import UsageError
from infra.spec import EICE, SSM, ClusterSpec

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import (
        RouteTableTypeDef,
        RouteTypeDef,
        VpcEndpointTypeDef,
    )


T = TypeVar("T")

_ANYWHERE = "0.0.0.0/0"
_TARGETS = (
    "GatewayId",
    "NatGatewayId",
    "TransitGatewayId",
    "NetworkInterfaceId",
    "VpcPeeringConnectionId",
    "LocalGatewayId",
    "CarrierGatewayId",
    "CoreNetworkArn",
)
_UNKNOWN_CALL = {"InvalidAction", "UnsupportedOperation", "UnknownOperationException"}
# Older agents than Ubuntu's also need ec2messages.
_AGENT_SERVICES = {"ssm", "ssmmessages"}
_AGENT_URL = "https://docs.aws.amazon.com/systems-manager/latest/userguide/setup-create-vpc.html"
_BLOCK_URL = "https://docs.aws.amazon.com/vpc/latest/userguide/security-vpc-bpa.html"


@dataclass(frozen=True)
class Way:
    """A subnet's route table. ``target`` is its default route's target ("" without one).

    With ``is_public``, the internet can reach a machine that has a public address:
    https://docs.aws.amazon.com/vpc/latest/userguide/configure-subnets.html#subnet-types
    """

    subnet_id: str
    table_id: str
    target: str
    is_public: bool
    is_inner: bool
    """Whether all routes end in the VPC: local ones, and those of endpoints."""
    endpoints: frozenset[str] = frozenset()
    """The gateway endpoints in its routes, also another account's, which EC2 does not list."""
    owner: str = ""
    """The account that owns the VPC."""

    @property
    def leads_out(self) -> bool:
        """Whether machines without public addresses reach the internet, such as through NAT."""
        return bool(self.target) and not self.target.startswith("igw-")

    @property
    def is_inspected(self) -> bool:
        """Whether a firewall may be between the subnet and an internet gateway.

        https://docs.aws.amazon.com/vpc/latest/userguide/gwlb-route.html
        """
        return not self.is_public and self.target.startswith(("vpce-", "eni-"))


def describe_ways(ec2: EC2Client, networks: Sequence[Network]) -> dict[str, Way]:
    """Return the way out by subnet id; omits subnets whose route table is not visible."""
    vpcs = sorted({network.vpc_id for network in networks})
    pages = ec2.get_paginator("describe_route_tables").paginate(
        Filters=[{"Name": "vpc-id", "Values": vpcs}]
    )
    tables = [table for page in pages for table in page["RouteTables"]]
    return {
        network.subnet_id: _way(network.subnet_id, table)
        for network in networks
        if (table := _table_of(network, tables))
    }


def describe_vpc_cidrs(ec2: EC2Client, vpc_id: str) -> tuple[str, ...]:
    """Return a VPC's address ranges, which are the local routes in its route tables."""
    found = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc_id]}])
    routes = [route for table in found["RouteTables"] for route in table.get("Routes", [])]
    local = [r.get("DestinationCidrBlock") for r in routes if r.get("GatewayId") == "local"]
    return tuple(dict.fromkeys(cidr for cidr in local if cidr))


def _table_of(network: Network, tables: Sequence[RouteTableTypeDef]) -> RouteTableTypeDef | None:
    """Return the subnet's own route table, else its VPC's main table."""
    main = None
    for table in tables:
        for association in table.get("Associations", []):
            if association.get("SubnetId") == network.subnet_id:
                return table
            if association.get("Main") and table.get("VpcId") == network.vpc_id:
                main = table
    return main


def _way(subnet_id: str, table: RouteTableTypeDef) -> Way:
    active = [route for route in table.get("Routes", []) if route.get("State") == "active"]
    default = [route for route in active if route.get("DestinationCidrBlock") == _ANYWHERE]
    # A narrower route to an internet gateway may also cover this machine's address.
    found = [_target_of(route) for route in active if not route.get("DestinationIpv6CidrBlock")]
    return Way(
        subnet_id,
        table["RouteTableId"],
        next(map(_target_of, default), ""),
        any(target.startswith("igw-") for target in found),
        all(target == "local" or target.startswith("vpce-") for target in found),
        frozenset(
            target
            for route in active
            if "DestinationPrefixListId" in route
            and (target := _target_of(route)).startswith("vpce-")
        ),
        table.get("OwnerId", ""),
    )


def _target_of(route: RouteTypeDef) -> str:
    values: Any = route
    return next((str(values[key]) for key in _TARGETS if values.get(key)), "")


def describe_block(
    ec2: EC2Client, networks: Sequence[Network], *, outward: bool = False
) -> tuple[str, frozenset[str]]:
    """Return the region's VPC Block Public Access mode, and the subnets where it blocks SSH.

    With ``outward``, the subnets where it blocks connections through a NAT gateway instead.
    """
    options = ec2.describe_vpc_block_public_access_options()["VpcBlockPublicAccessOptions"]
    mode = options.get("InternetGatewayBlockMode", "off")
    if mode == "off" or (outward and mode == "block-ingress"):
        return mode, frozenset()
    found = ec2.describe_vpc_block_public_access_exclusions()["VpcBlockPublicAccessExclusions"]
    # An egress-only exclusion does not allow SSH in.
    modes = {"allow-bidirectional"} | ({"allow-egress"} if outward else set())
    excluded = {
        each.get("ResourceArn", "").rpartition("/")[2]
        for each in found
        if each.get("InternetGatewayExclusionMode") in modes
        and each.get("State") in ("create-complete", "update-complete")
    }
    closed = {n.subnet_id for n in networks if not {n.subnet_id, n.vpc_id} & excluded}
    return mode, frozenset(closed)


def require_ways(
    clients: Clients,
    networks: Sequence[Network],
    note: Callable[[str], None],
    spec: ClusterSpec,
    *,
    installs: bool = True,
) -> list[Network]:
    """Return the subnets whose machines are reachable and, with ``installs``, can install software.

    For ``--private --jump ssm``, the machines must be able to reach Session Manager in any case.
    Notes and skips checks for which permission is missing.
    Raises :class:`UsageError` if no subnet is left.
    """
    ec2, unknown = clients.ec2, dict[str, Way]()
    ways = look_if_allowed(lambda: describe_ways(ec2, networks), unknown, note)
    private = spec.private
    if private:
        if not installs and (spec.jump != SSM or _has_agent_endpoints(ec2, networks, note)):
            return list(networks)
        # Endpoints may be in another VPC, behind a narrower route.
        inward = [w for w in ways.values() if not w.leads_out and (installs or w.is_inner)]
        if not installs:
            inward = _surely(inward, clients, note, "Session Manager")
        left = _without(networks, inward, _PRIVATE if installs else _AGENT)
        # Another account, whose mode is unknown, may own the exit behind a transit gateway.
        over_nat = {way.subnet_id for way in ways.values() if way.target.startswith("nat-")}
        checked = [network for network in left if network.subnet_id in over_nat]
    else:
        left = checked = _without(networks, _unreachable(ways.values(), note), _PUBLIC)
    if not checked:
        return left
    mode, closed = look_if_allowed(
        lambda: describe_block(ec2, checked, outward=private), ("off", frozenset[str]()), note
    )
    if closed >= {network.subnet_id for network in left}:
        what = "be reached at a public address"
        if private:
            goal = "install software" if installs else "reach Session Manager"
            what = f"{goal} over a NAT gateway"
        other = "" if private else "; or use machines without public addresses: --private"
        raise UsageError(
            f"VPC Block Public Access is {mode} in {ec2.meta.region_name}: machines in "
            f"{', '.join(sorted(closed))} can't {what}",
            hint=f"an administrator can exclude the VPC or the subnet ({_BLOCK_URL}){other}",
        )
    return [network for network in left if network.subnet_id not in closed]


def _has_agent_endpoints(
    ec2: EC2Client, networks: Sequence[Network], note: Callable[[str], None]
) -> bool:
    """Whether the VPC has endpoints of the SSM agent's services; True without permission to look.

    Endpoints without private DNS may have the user's own hosted zone.
    """
    found = look_if_allowed(lambda: _describe_endpoints(ec2, networks), None, note)
    return found is None or {service for service, _ in found} >= _AGENT_SERVICES


def _describe_endpoints(
    ec2: EC2Client, networks: Sequence[Network]
) -> list[tuple[str, VpcEndpointTypeDef]]:
    """Return the VPC's endpoints that work, each with its service, such as ``s3``."""
    vpcs = sorted({network.vpc_id for network in networks})
    pages = ec2.get_paginator("describe_vpc_endpoints").paginate(
        Filters=[{"Name": "vpc-id", "Values": vpcs}]
    )
    return [
        (each["ServiceName"].rpartition(".")[2], each)
        for page in pages
        for each in page["VpcEndpoints"]
        if each["State"].lower() in ("available", "partial")
    ]


def require_s3(
    clients: Clients,
    networks: Sequence[Network],
    note: Callable[[str], None],
    spec: ClusterSpec,
) -> list[Network]:
    """Return the subnets whose machines reach the S3 of ``--bucket`` and ``--read-from``, not over a proxy.

    Notes what NAT gateways cost, and skips the check if permission is missing.
    Raises :class:`UsageError` if no subnet is left.
    """
    if not (networks and spec.private and (spec.bucket or spec.read_from)):
        return list(networks)
    ec2 = clients.ec2
    found = look_if_allowed(lambda: _describe_endpoints(ec2, networks), None, note)
    # If this permission is missing, require_ways has noted it.
    ways = look_if_allowed(lambda: describe_ways(ec2, networks), dict[str, Way](), lambda _: None)
    endpoints = [endpoint for service, endpoint in found or () if service == "s3"]
    if found is None or any(each.get("VpcEndpointType") == "Interface" for each in endpoints):
        return list(networks)
    tables = {table for each in endpoints for table in each.get("RouteTableIds", ())}
    not_s3 = {each.get("VpcEndpointId") for service, each in found if service != "s3"}
    # An endpoint that is not listed may be S3's.
    others = [w for w in ways.values() if w.table_id not in tables and w.endpoints <= not_s3]
    # Machines without public addresses can't use an internet gateway. S3 may have a narrower route.
    closed = [w for w in others if not w.leads_out and (w.is_inner or w.is_public)]
    closed = _surely(closed, clients, note, "S3")
    region, vpc = ec2.meta.region_name, networks[0].vpc_id
    create = (
        f"create a gateway endpoint, which is free: aws ec2 create-vpc-endpoint --region {region} --vpc-id "
        f"{vpc} --service-name com.amazonaws.{region}.s3 --route-table-ids {{table}}"
    )
    what = (
        "its machines can't reach S3 without public addresses, and S3 traffic does not use --proxy"
    )
    left = _without(networks, closed, (what, create))
    if costly := [way for way in others if way.target.startswith("nat-")]:
        note(
            f"S3 traffic from {costly[0].subnet_id} goes through {costly[0].target}, which costs about "
            f"$0.045 per GB; {create.format(table=costly[0].table_id)}."
        )
    return left


def _surely(
    closed: list[Way], clients: Clients, note: Callable[[str], None], what: str
) -> list[Way]:
    """Return the ways without those in a shared VPC, whose owner may have interface endpoints there."""
    shared = [way for way in closed if way.owner not in ("", clients.caller.account)]
    if shared:
        note(
            f"Can't check whether machines in {shared[0].subnet_id} reach {what}: account "
            f"{shared[0].owner} owns the VPC and its endpoints."
        )
    return [way for way in closed if way not in shared]


def _unreachable(ways: Collection[Way], note: Callable[[str], None]) -> list[Way]:
    """Return the ways that block SSH. Firewalled ways count only if another way is public."""
    if not any(way.is_public for way in ways) and (found := [w for w in ways if w.is_inspected]):
        note(
            f"The route to {found[0].subnet_id} goes through a firewall endpoint, {found[0].target}; "
            "the firewall may block SSH."
        )
        return [way for way in ways if not way.is_inspected]
    return [way for way in ways if not way.is_public]


_PUBLIC = (
    "its machines can't be reached from the internet",
    "choose a subnet with a route to an internet gateway (--subnet-id), or add the route: `aws ec2 "
    f"create-route --route-table-id {{table}} --destination-cidr-block {_ANYWHERE} --gateway-id "
    "igw-…`; or use machines without public addresses: --private",
)
_PRIVATE = (
    "its machines can't install software without public addresses",
    "choose a subnet with a route to a NAT or transit gateway (--subnet-id), or add the route: `aws "
    f"ec2 create-route --route-table-id {{table}} --destination-cidr-block {_ANYWHERE} "
    "--nat-gateway-id nat-…`",
)
_AGENT = (
    "its machines can't reach Session Manager: they have no public addresses, and their agent does not use "
    "--proxy",
    "create interface endpoints for ssm and ssmmessages in the VPC "
    f"({_AGENT_URL}), choose a subnet with a route to a NAT or transit gateway (--subnet-id), or choose "
    "another --jump",
)


def _without(
    networks: Sequence[Network], bad: Sequence[Way], texts: tuple[str, str]
) -> list[Network]:
    """Return the subnets that have no bad way. Raises :class:`UsageError` if none is left."""
    useless = {way.subnet_id for way in bad}
    left = [network for network in networks if network.subnet_id not in useless]
    if left or not bad:
        return left
    what, hint = texts
    table, target = bad[0].table_id, bad[0].target
    alike = [way.subnet_id for way in bad if way.table_id == table]
    subnets = alike[0] + (f" and {len(alike) - 1} more" if alike[1:] else "")
    goes = f"sends {_ANYWHERE} to {target}" if target else f"has no route for {_ANYWHERE}"
    raise UsageError(
        f"{subnets}: route table {table} {goes}; {what}", hint=hint.format(table=table)
    )


def look_if_allowed(call: Callable[[], T], otherwise: T, note: Callable[[str], None]) -> T:
    """Make a call; without permission for it, note that and return ``otherwise``."""
    try:
        return call()
    except ClientError as error:
        if error_code(error) not in DENIED | _UNKNOWN_CALL:
            raise
        note(f"Can't check the route to the machines: no permission for {error.operation_name}.")
        return otherwise


# While and after an endpoint is modified, it serves with its old configuration or the new one:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/modify-ec2-instance-connect-endpoint.html
_READY = {"create-complete", "update-in-progress", "update-complete", "update-failed"}
HOST_MANAGEMENT = "/ssm/managed-instance/default-ec2-instance-management-role"
_HOST_MANAGEMENT_URL = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/fleet-manager-default-host-"
    "management-configuration.html"
)
_SSM_POLICY = "AmazonSSMManagedInstanceCore"


def require_jump(
    clients: Clients, spec: ClusterSpec, networks: Sequence[Network], note: Callable[[str], None]
) -> None:
    """Raise :class:`UsageError` if machines in these subnets would be unreachable through ``--jump``.

    Notes and skips checks for which permission is missing.
    """
    if spec.jump == EICE and networks:
        _require_endpoint(clients, networks[0], note)
    if spec.jump == SSM:
        _require_host_management(clients, spec.instance_profile, note)


def _require_endpoint(clients: Clients, network: Network, note: Callable[[str], None]) -> None:
    """Require an endpoint in the VPC; it serves all of the VPC's subnets."""
    vpc, region = network.vpc_id, clients.ec2.meta.region_name
    # Without permission for this call, the AWS CLI can't open a tunnel either.
    pages = clients.ec2.get_paginator("describe_instance_connect_endpoints").paginate(
        Filters=[{"Name": "vpc-id", "Values": [vpc]}]
    )
    found = [each for page in pages for each in page["InstanceConnectEndpoints"]]
    ready = [each for each in found if each.get("State") in _READY]
    if not ready:
        states = ", ".join(f"{e['InstanceConnectEndpointId']} is {e['State']}" for e in found)
        raise UsageError(
            f"--jump {EICE}: {vpc} has no EC2 Instance Connect Endpoint"
            + (f" that is ready: {states}" if states else ""),
            hint=f"create one: aws ec2 create-instance-connect-endpoint --region {region} "
            f"--subnet-id {network.subnet_id}; or choose another --jump",
        )
    if all(each.get("PreserveClientIp") for each in ready):
        note(
            f"{ready[0]['InstanceConnectEndpointId']} preserves client addresses, so --ssh-cidr must "
            "include this machine's address."
        )


def _require_host_management(
    clients: Clients, profile: str | None, note: Callable[[str], None]
) -> None:
    """Require the setting by which machines join Session Manager, unless the user's profile may do it.

    Machines whose profile does not permit it, such as the one for --bucket, also join by the setting.
    """
    look = partial(clients.ssm.get_service_setting, SettingId=HOST_MANAGEMENT)
    found = look_if_allowed(look, None, note)
    if not found or found["ServiceSetting"].get("SettingValue", "") not in ("", "$None"):
        return
    off = f"Default Host Management Configuration is off in {clients.ec2.meta.region_name}"
    if profile:
        note(f"{off}, so the role in instance profile {profile} needs the policy {_SSM_POLICY}.")
        return
    raise UsageError(
        f"--jump {SSM}: {off}, and without it, machines register with Session Manager only if their "
        "--instance-profile permits it",
        hint=f"ask an administrator to turn it on ({_HOST_MANAGEMENT_URL}), choose an --instance-profile "
        f"whose role has the policy {_SSM_POLICY}, or choose another --jump",
    )
