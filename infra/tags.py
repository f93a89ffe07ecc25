"""The tags that every resource of ours carries, from the call that creates it. They are the only state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types_boto3_ec2.type_defs import FilterTypeDef, TagSpecificationTypeDef

CLUSTER = "spr-cluster:cluster"
ROLE = "spr-cluster:role"
STACK = "spr-cluster:stack"
EXPIRES = "spr-cluster:expires"
INSTALLED = "spr-cluster:installed"
"""On a machine or an image: the digest of the software that it has, whole."""
SEALED = "spr-cluster:sealed"
"""On an image: it was made without the machine's private keys and identity."""
KEPT = "spr-cluster:kept"
"""On an image: kept on purpose, by ``down --keep-image`` or ``bake``; any cluster may start from it."""
USED = "spr-cluster:used"
"""On an image: its head had run jobs, so that it holds somebody's data; good for its own cluster alone."""
MESH = "spr-cluster:mesh"
"""On the head: which nodes were connected last."""


def resource_tags(cluster: str, resource: str, **more: str) -> dict[str, str]:
    """Tags of one resource of a cluster; ``resource`` ends its display name."""
    return {"Name": f"{cluster}-{resource}", CLUSTER: cluster, **more}


def tag_specifications(
    resource_types: Iterable[str], tags: Mapping[str, str]
) -> list[TagSpecificationTypeDef]:
    """The request part that tags resources in the very call that creates them."""
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    specs: list[Any] = [{"ResourceType": kind, "Tags": listed} for kind in resource_types]
    return specs


def cluster_filter(cluster: str) -> list[FilterTypeDef]:
    """The filter that finds whatever belongs to a cluster."""
    return [{"Name": f"tag:{CLUSTER}", "Values": [cluster]}]


def from_aws(tags: Iterable[Mapping[str, Any]] | None) -> dict[str, str]:
    """EC2's list of keys and values as a dictionary."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in tags or ()}


_TIME = "%Y-%m-%dT%H:%M:%SZ"


def render_time(time: datetime) -> str:
    """A time as a tag's value, in UTC."""
    return time.astimezone(timezone.utc).strftime(_TIME)


def parse_time(text: str) -> datetime:
    """The time in a tag's value."""
    return datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc)
