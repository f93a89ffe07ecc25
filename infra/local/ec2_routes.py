"""Route tables with the default route, which AWS gives to a default VPC and moto does not; network ACLs.

https://docs.aws.amazon.com/vpc/latest/userguide/default-vpc-components.html
"""

from __future__ import annotations

from typing import Any

from infra.local.faults import NetworkFaults

_ANYWHERE = "0.0.0.0/0"
# By the fault: the ports at the receiver that no packet reaches, and whether it is outside.
_DENIED = {
    "no-ssh": (22, 22, False),
    "no-answers": (1024, 65535, True),
    "no-downloads": (443, 443, True),
}


def render(table: Any, network: NetworkFaults) -> dict[str, Any]:
    """Return one of moto's route tables, with the default route that the faults leave to it."""
    routes = [_render_route(route) for route in table.routes]
    if not any(route["DestinationCidrBlock"] == _ANYWHERE for route in routes):
        suffix, default = table.vpc_id.removeprefix("vpc-"), {}
        if network.nat:
            default = {"NatGatewayId": f"nat-{suffix}"}
        elif network.firewall:
            # A Gateway Load Balancer's endpoint, as AWS Network Firewall has it.
            default = {"GatewayId": f"vpce-{suffix}"}
        elif network.internet_gateway:
            default = {"GatewayId": f"igw-{suffix}"}
        more = {"Origin": "CreateRoute", "State": "active"}
        routes += [{"DestinationCidrBlock": _ANYWHERE, **default, **more}] if default else []
    return {
        "RouteTableId": table.id,
        "VpcId": table.vpc_id,
        "OwnerId": table.owner_id,
        "Associations": table.associations,
        "Routes": routes,
        "Tags": table.get_tags(),
    }


def _render_route(route: Any) -> dict[str, Any]:
    return {
        "DestinationCidrBlock": route.destination_cidr_block,
        "GatewayId": route.gateway_id,
        "NatGatewayId": route.nat_gateway_id,
        "TransitGatewayId": route.transit_gateway_id,
        "Origin": route.origin,
        "State": route.state,
    }


def render_acl(acl: Any, network: NetworkFaults) -> dict[str, Any]:
    """Return one of moto's network ACLs, with the rule that the faults add."""
    entries = list(acl.entries)
    if network.acl in _DENIED:
        first, last, is_outbound = _DENIED[network.acl]
        tcp = {"Protocol": "6", "PortRange": {"From": first, "To": last}, "CidrBlock": _ANYWHERE}
        entries.append({"RuleNumber": 1, "RuleAction": "deny", "Egress": is_outbound, **tcp})
    return {
        "NetworkAclId": acl.id,
        "VpcId": acl.vpc_id,
        "OwnerId": acl.owner_id,
        "IsDefault": acl.default,
        "Associations": acl.associations,
        "Entries": entries,
        "Tags": acl.get_tags(),
    }
