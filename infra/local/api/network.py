"""Additions to moto's route tables and security groups; and placement groups.

https://docs.aws.amazon.com/vpc/latest/userguide/default-vpc-components.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-groups.html
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError, InvalidPermissionNotFoundError
from moto.ec2.models import EC2Backend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.utils import generic_filter, random_id

from infra.local.api import refusals
from infra.local.api.runtime import Part

ANYWHERE = "0.0.0.0/0"


def render_route_table(table: Any) -> dict[str, Any]:
    """Render one of moto's route tables, with a default route to an internet gateway."""
    routes = [_render_route(route) for route in table.routes]
    if not any(route["DestinationCidrBlock"] == ANYWHERE for route in routes):
        gateway = f"igw-{table.vpc_id.removeprefix('vpc-')}"
        more = {"GatewayId": gateway, "Origin": "CreateRoute", "State": "active"}
        routes.append({"DestinationCidrBlock": ANYWHERE, **more})
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


class SecurityGroups(Part):
    """A region's security groups; moto stores them."""

    def delete(self, name: str | None = None, group_id: str | None = None) -> None:
        if group_id:
            refusals.require_unused_group(self._ec2, group_id)
        EC2Backend.delete_security_group(self._ec2, name, group_id)

    def revoke_ingress(self, ip_ranges: list[dict[str, str]], **asked: Any) -> None:
        """Revoke ranges that match a rule; a given description must match as well, as on AWS.

        In a default VPC, ranges without a match are not an error:
        https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RevokeSecurityGroupIngress.html
        """
        group = self._ec2.get_security_group_by_name_or_id(asked["group_name_or_id"])
        is_default = group is not None and group.vpc_id == self._ec2.default_vpc.id
        rules = [rule.ip_range for rule in group.ingress_rules] if group else []
        known = [one for one in ip_ranges if any(one.items() <= rule.items() for rule in rules)]
        if known != ip_ranges and not is_default:
            raise InvalidPermissionNotFoundError
        try:
            EC2Backend.revoke_security_group_ingress(self._ec2, ip_ranges=known, **asked)
        except InvalidPermissionNotFoundError:
            if not is_default:
                raise


class PlacementGroup(TaggedEC2Resource):
    """A placement group; moto's serializer depends on the attribute names."""

    def __init__(self, backend: Any, name: str, strategy: str, tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = self.group_id = random_id("pg")
        self.group_name = name
        self.strategy = strategy
        self.state = "available"
        owner = f"{backend.region_name}:{backend.account_id}"
        self.group_arn = f"arn:aws:ec2:{owner}:placement-group/{name}"
        self.add_tags(tags)


class PlacementGroups(Part):
    """A region's placement groups."""

    def __init__(self, ec2: Any) -> None:
        super().__init__(ec2)
        self.by_name: dict[str, PlacementGroup] = {}

    def create(self, name: str, strategy: str, tags: dict[str, str]) -> PlacementGroup:
        if name in self.by_name:
            raise EC2ClientError(
                "InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists."
            )
        group = self.by_name[name] = PlacementGroup(self._ec2, name, strategy, tags)
        return group

    def find(self, name: str) -> PlacementGroup:
        """Return the group with this name or id."""
        for group in self.by_name.values():
            if name in (group.group_name, group.id):
                return group
        raise EC2ClientError(
            "InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown."
        )

    def require_zone(self, name: str, zone: str) -> None:
        """Refuse a second zone: a group stays in one zone until all of its instances have ended."""
        group = self.find(name)
        zones = self._zones_of(group)
        if zones - {zone}:
            raise EC2ClientError(
                "InvalidPlacementGroup.InUse",
                f"The placement group '{group.group_name}' is in use in another availability zone: "
                f"{', '.join(sorted(zones))}",
            )

    def describe(self, names: list[str], filters: Any) -> list[PlacementGroup]:
        found = [self.find(name) for name in names]
        return list(generic_filter(filters, found if names else list(self.by_name.values())))

    def delete(self, name: str) -> None:
        """Delete an empty group; an instance that is shutting down still occupies it."""
        group = self.find(name)
        if self._zones_of(group):
            raise EC2ClientError(
                "InvalidPlacementGroup.InUse",
                f"The placement group '{group.group_name}' is in use and may not be deleted.",
            )
        del self.by_name[group.group_name]
        self._ec2.tags.pop(group.id, None)

    def _zones_of(self, group: PlacementGroup) -> set[str]:
        """Return the zones of a group's instances; empty for an empty group."""
        instances = self._ec2.live_instances()
        return {
            str(i.placement.zone) for i in instances if i.placement.group_name == group.group_name
        }
