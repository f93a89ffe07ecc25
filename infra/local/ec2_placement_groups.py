"""Placement groups, which moto lacks: machines that stand close together.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-groups.html
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, EC2_RESOURCE_TO_PREFIX, generic_filter, random_id

from infra.local.ec2_images import ImagesBackend

# What DescribeTags says that an id is the id of.
for _kind, _prefix in (("placement-group", "pg"), ("spot-instances-request", "sir")):
    EC2_RESOURCE_TO_PREFIX[_kind] = _prefix
    EC2_PREFIX_TO_RESOURCE[_prefix] = _kind


class PlacementGroup(TaggedEC2Resource):
    """A placement group; the attributes' names are those that moto's serializer looks for."""

    def __init__(self, backend: Any, name: str, strategy: str, tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = self.group_id = random_id("pg")
        self.group_name = name
        self.strategy = strategy
        self.state = "available"
        self.group_arn = (
            f"arn:aws:ec2:{backend.region_name}:{backend.account_id}:placement-group/{name}"
        )
        self.add_tags(tags)


class GroupsBackend(ImagesBackend):
    """The part of a region's state that is about placement groups."""

    def __init__(self, region_name: str, account_id: str) -> None:
        self.placement_groups: dict[str, PlacementGroup] = {}
        super().__init__(region_name, account_id)

    def create_placement_group(
        self, name: str, strategy: str, tags: dict[str, str]
    ) -> PlacementGroup:
        if name in self.placement_groups:
            raise EC2ClientError(
                "InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists."
            )
        group = self.placement_groups[name] = PlacementGroup(self, name, strategy, tags)
        return group

    def find_placement_group(self, name: str) -> PlacementGroup:
        """The group of that name or id."""
        for group in self.placement_groups.values():
            if name in (group.group_name, group.id):
                return group
        raise EC2ClientError(
            "InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown."
        )

    def require_group_in_zone(self, name: str, zone: str) -> None:
        """A group with machines in it belongs to their zone until the last of them has ended."""
        group = self.find_placement_group(name)
        zones = {
            str(i.placement.zone)
            for i in self._alive()
            if i.placement.group_name == group.group_name
        }
        if zone and zones - {zone}:
            raise EC2ClientError(
                "InvalidPlacementGroup.InUse",
                f"The placement group '{group.group_name}' is in use in another availability zone: "
                f"{', '.join(sorted(zones))}",
            )

    def describe_placement_groups(self, names: list[str], filters: Any) -> list[PlacementGroup]:
        found = [self.find_placement_group(name) for name in names]
        groups = found if names else list(self.placement_groups.values())
        return list(generic_filter(filters, groups))

    def delete_placement_group(self, name: str) -> None:
        """Delete a group that no machine is in; one that is just ending still is."""
        group = self.find_placement_group(name)
        if any(i.placement.group_name == group.group_name for i in self._alive()):
            raise EC2ClientError(
                "InvalidPlacementGroup.InUse",
                f"The placement group '{group.group_name}' is in use and may not be deleted.",
            )
        del self.placement_groups[group.group_name]
        self.tags.pop(group.id, None)
