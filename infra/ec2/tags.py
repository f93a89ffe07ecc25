"""The tags of our resources. They are the only state; the call that creates a resource sets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any

from infra.words import LONGEST_TAG

if TYPE_CHECKING:
    from types_boto3_ec2.type_defs import FilterTypeDef, TagSpecificationTypeDef

CLUSTER = "spr-cluster:cluster"
ROLE = "spr-cluster:role"
STACK = "spr-cluster:stack"
EXPIRES = "spr-cluster:expires"
LATEST = "spr-cluster:latest"
"""On a group or machine: when the nodes shut down in any case."""
OWNER_KEY = "spr-cluster:owner-key"
"""On a group or machine: the fingerprint of its creator's SSH key."""
GUARD = "spr-cluster:second-guard"
"""On a group: the cluster has a second guard, see :mod:`infra.ec2.termination_schedule`."""
OWNER = "spr-cluster:owner"
"""The ARN of the cluster's creator, as information for people: see :mod:`infra.aws.caller`."""
INSTALLED = "spr-cluster:installed"
"""On a machine or image: the digest of its software, once fully installed."""
SEALED = "spr-cluster:sealed"
"""On an image: its machine's private keys and identity have been removed."""
PACKAGES = "spr-cluster:packages"
"""On an image of ``bake --packages``: the list's key and file: ``0123456789abcdef requirements.txt``."""
KEPT = "spr-cluster:kept"
"""On an image: kept by ``down --keep-image`` or ``bake`` for any cluster."""
USED = "spr-cluster:used"
"""On an image: the head had run jobs, so the image may hold user data and is only for its own cluster."""
RANKS = "spr-cluster:ranks"
"""On a machine: the ranks of the machines that were bought together, in EC2's launch order: ``1-3 7``."""
REPLACES = "spr-cluster:replaces"
"""On a machine: the machines that it replaces, and why."""
MESH = "spr-cluster:mesh"
"""On the head: the digest of the nodes in the current mesh."""


def profile_name(cluster: str, region: str) -> str:
    """Return the name of the nodes' role and instance profile, of at most 62 of 64 characters.

    IAM is global but clusters are regional; the suffixes separate the two roles in IAM policies.
    """
    return f"{resource_name(cluster)}-{region}-s3"


def guard_role(cluster: str, region: str) -> str:
    """Return the name of the second guard's role, of at most 63 of 64 characters."""
    return f"{resource_name(cluster)}-{region}-end"


def resource_name(cluster: str) -> str:
    """Return the EC2 name of a cluster's key pair, security group, and placement group."""
    return f"spr-cluster-{cluster}"


def resource_tags(cluster: str, resource: str, **more: str) -> dict[str, str]:
    """Return the tags of a cluster's resource; ``resource`` is the suffix of its display name."""
    return {"Name": f"{cluster}-{resource}", CLUSTER: cluster, **more}


def render_ranks(ranks: Sequence[int]) -> str:
    """Render ascending ranks as a tag value such as ``1-3 7``; "" if it would be too long."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda p: p[1] - p[0])
    ]
    text = " ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)
    return text if len(text) <= LONGEST_TAG else ""


def parse_rank(text: str, index: int) -> int | None:
    """Return one of the ranks in a tag value such as ``1-3 7``. Raises ``ValueError``."""
    runs = ([int(word) for word in run.split("-")] for run in text.split())
    ranks = chain.from_iterable(range(run[0], run[-1] + 1) for run in runs)
    return next(islice(ranks, index, None), None)


def user_labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the user's own among a resource's tags."""
    own = ("spr-cluster:", "aws:")
    return tuple(sorted((k, v) for k, v in labels.items() if k != "Name" and not k.startswith(own)))


def tag_specifications(
    resource_types: Iterable[str], tags: Mapping[str, str]
) -> list[TagSpecificationTypeDef]:
    """Return the request parameter that tags resources on creation."""
    specs: list[Any] = [{"ResourceType": kind, "Tags": to_aws(tags)} for kind in resource_types]
    return specs


def cluster_filter(cluster: str) -> list[FilterTypeDef]:
    """Return the filter for all resources of a cluster."""
    return [{"Name": f"tag:{CLUSTER}", "Values": [cluster]}]


def to_aws(tags: Mapping[str, str]) -> Any:
    """Convert a dictionary to AWS's list of keys and values."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def from_aws(tags: Iterable[Mapping[str, Any]] | None) -> dict[str, str]:
    """Convert EC2's list of keys and values to a dictionary."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in tags or ()}


_TIME = "%Y-%m-%dT%H:%M:%SZ"


def render_time(time: datetime) -> str:
    """Render a time as a tag value, in UTC."""
    return time.astimezone(timezone.utc).strftime(_TIME)


def parse_time(text: str) -> datetime:
    """Parse the time in a tag value."""
    return datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc)
