"""Tags: two kinds of resources that moto lacks, and a fast way to read tags by id."""

from __future__ import annotations

from typing import Any

from moto.ec2.models import EC2Backend
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, EC2_RESOURCE_TO_PREFIX, get_prefix

# DescribeTags derives the kind of a resource from its id.
for _kind, _prefix in (("placement-group", "pg"), ("spot-instances-request", "sir")):
    EC2_RESOURCE_TO_PREFIX[_kind] = _prefix
    EC2_PREFIX_TO_RESOURCE[_prefix] = _kind


def describe_tags(ec2: Any, filters: dict[str, list[str]] | None) -> Any:
    """Return the tags of resources; moto matches every tag with a pattern, plain ids need none."""
    ids = (filters or {}).get("resource-id", [])
    is_by_id = filters and filters.keys() == {"resource-id"}
    if not is_by_id or any(set("*?[") & set(i) for i in ids):
        return EC2Backend.describe_tags(ec2, filters)
    return [
        {
            "resource_id": id_,
            "key": key,
            "value": value,
            "resource_type": EC2_PREFIX_TO_RESOURCE.get(get_prefix(id_), ""),
        }
        for id_ in ids
        for key, value in ec2.tags.get(id_, {}).items()
    ]
