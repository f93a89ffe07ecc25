"""Placement groups, which moto lacks: instances that are placed close together.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-groups.html
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.utils import generic_filter, random_id


class PlacementGroup(TaggedEC2Resource):
    """A placement group; moto's serializer looks for its attributes by these names."""

    def __init__(self, backend: Any, name: str, strategy: str, tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = self.group_id = random_id("pg")
        self.group_name = name
        self.strategy = strategy
        self.state = "available"
        owner = f"{backend.region_name}:{backend.account_id}"
        self.group_arn = f"arn:aws:ec2:{owner}:placement-group/{name}"
        self.add_tags(tags)


class PlacementGroups:
    """A region's placement groups."""

    def __init__(self, ec2: Any) -> None:
        self._ec2 = ec2
        self.by_name: dict[str, PlacementGroup] = {}

    def create(self, name: str, strategy: str, tags: dict[str, str]) -> PlacementGroup:
        if name in self.by_name:
            raise EC2ClientError(
                "InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists."
            )
        group = self.by_name[name] = PlacementGroup(self._ec2, name, strategy, tags)
        return group

    def find(self, name: str) -> PlacementGroup:
        """Return the group of that name or id."""
        for group in self.by_name.values():
            if name in (group.group_name, group.id):
                return group
        raise EC2ClientError(
            "InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown."
        )

    def require_zone(self, name: str, zone: str) -> None:
        """Refuse a second zone: a group stays in one until the last of its instances has ended."""
        group = self.find(name)
        zones = self._zones_of(group)
        if zone and zones - {zone}:
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
        """Return the zones of a group's instances: none if it is empty."""
        instances = self._ec2.live_instances()
        return {
            str(i.placement.zone) for i in instances if i.placement.group_name == group.group_name
        }
