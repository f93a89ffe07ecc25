"""The nodes' role and instance profile for `up --bucket`: they may use these S3 prefixes, and nothing else.

The profile is created first and deleted last, so that it shows that a role may exist.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from infra.aws.clients import DENIED, Clients, unless
from infra.aws.roles import EXISTS, delete_role, make_role, when_settled
from infra.ec2 import tags
from infra.ec2.inventory import Inventory, Resource
from infra.s3_url import S3Location, parse_s3_url
from infra.spec import ClusterSpec
from infra.wait import Clock

_MISSING = {"NoSuchEntity"}
_RECORDED = ("spr-cluster:bucket", "spr-cluster:read-from")
_WRITE = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")


class ClusterProfile:
    """The role and the instance profile of one cluster in the clients' region, with the same name."""

    def __init__(self, clients: Clients, cluster: str, clock: Clock | None = None) -> None:
        self._iam, self._cluster, self._clock = clients.iam, cluster, clock
        self._clients = clients
        self._name = tags.profile_name(cluster, clients.ec2.meta.region_name)

    def find(self) -> tuple[Resource, ...]:
        """Return the profile; empty if it does not exist, or has the name but not the cluster's tag."""
        found = unless(
            _MISSING, lambda: self._iam.get_instance_profile(InstanceProfileName=self._name)
        )
        if not found:
            return ()
        profile: Any = found["InstanceProfile"]
        labels = tags.from_aws(profile.get("Tags"))
        if labels.get(tags.CLUSTER) != self._cluster:
            return ()
        return (Resource(self._name, labels, "ready" if profile["Roles"] else ""),)

    def make(self, spec: ClusterSpec) -> None:
        """Create the profile and its role, or what is missing of them. The role gets its rights first."""
        iam, profile = self._iam, {"InstanceProfileName": self._name}
        labels: Any = tags.to_aws(tags.resource_tags(self._cluster, "s3"))
        unless(EXISTS, lambda: iam.create_instance_profile(**profile, Tags=labels))
        partition = self._clients.caller.arn.split(":")[1]
        # Unlike most services, EC2 has another name in China:
        # https://github.com/hashicorp/terraform-provider-aws/pull/47141
        service = "ec2.amazonaws.com" + ".cn" * (partition == "aws-cn")
        make_role(
            iam,
            {"Principal": {"Service": service}},
            node_rights(spec, partition),
            spec.permissions_boundary,
            self._clock,
            RoleName=self._name,
            Description=f"Lets the nodes of cluster {self._cluster} use its S3 prefixes",
            Tags=labels,
        )
        # A profile holds one role, and this one can only be ours.
        add = partial(iam.add_role_to_instance_profile, **profile, RoleName=self._name)
        when_settled(lambda: unless({"LimitExceeded"}, add), self._clock)

    def remove(self) -> None:
        """Delete the role, then the profile."""
        iam, profile = self._iam, {"InstanceProfileName": self._name}
        leave = partial(iam.remove_role_from_instance_profile, **profile, RoleName=self._name)
        unless(_MISSING, leave)
        delete_role(iam, self._name)
        unless(_MISSING, lambda: iam.delete_instance_profile(**profile))


def node_rights(spec: ClusterSpec, partition: str) -> list[dict[str, Any]]:
    """Return what the nodes may do: all with objects below the bucket's prefix, and read elsewhere."""
    rights = allow_key(spec.bucket_kms_key, "Decrypt", "GenerateDataKey")
    if spec.bucket:
        place = parse_s3_url(spec.bucket)
        rights += allow_prefix(place, _WRITE, partition)
        # S3 can't limit this one to a prefix.
        bucket = f"arn:{partition}:s3:::{place.bucket}"
        rights.append({"Action": ["s3:ListBucketMultipartUploads"], "Resource": bucket})
    for url in spec.read_from:
        objects, listing = allow_prefix(place := parse_s3_url(url), ("s3:GetObject",), partition)
        if place.prefix:
            # It may be an object.
            objects["Resource"] = [objects["Resource"].removesuffix("/*"), objects["Resource"]]
        rights += [objects, listing]
    return rights


def allow_prefix(
    place: S3Location, actions: tuple[str, ...], partition: str = "*"
) -> list[dict[str, Any]]:
    """Return statements that allow actions on the objects below a prefix, and listing them."""
    bucket = f"arn:{partition}:s3:::{place.bucket}"
    below = f"{bucket}/{place.below('*').prefix}"
    objects = {"Effect": "Allow", "Action": list(actions), "Resource": below}
    listing: dict[str, Any] = {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": bucket}
    if place.prefix:
        # With the slash: `results` is also the beginning of `results-of-others`.
        listing["Condition"] = {"StringLike": {"s3:prefix": f"{place.prefix}/*"}}
    return [objects, listing]


def allow_key(key: str | None, *operations: str) -> list[dict[str, Any]]:
    """Return the statement, if there is a key, that allows its use through S3."""
    via = {"StringLike": {"kms:ViaService": "s3.*.amazonaws.com*"}}
    actions = [f"kms:{each}" for each in operations]
    allowed = {"Effect": "Allow", "Action": actions, "Resource": key, "Condition": via}
    return [allowed] if key else []


def has_profile(found: Inventory) -> bool:
    """Return whether a cluster's record says that its nodes have their own role."""
    labels = [group.tags for group in found.security_groups]
    return any(
        any(each.get(key) for key in _RECORDED) and not each.get("spr-cluster:instance-profile")
        for each in labels
    )


def with_profile(
    clients: Clients, cluster: str, found: Inventory, *, is_certain: bool
) -> Inventory:
    """Add the role and profile to an inventory. Unless ``is_certain``, a denial means that there is none."""
    profile = ClusterProfile(clients, cluster)
    profiles = profile.find() if is_certain else unless(DENIED, profile.find)
    return replace(found, instance_profiles=profiles or ())


def with_profiles(clients: Clients, clusters: dict[str, Inventory]) -> dict[str, Inventory]:
    """Add a region's profiles to its clusters, including clusters with no other resources."""
    known, start = dict(clusters), tags.resource_name("")
    end = tags.profile_name("", clients.ec2.meta.region_name).removeprefix(start)
    pages = clients.iam.get_paginator("list_instance_profiles").paginate()
    listed = unless(DENIED, lambda: [each for page in pages for each in page["InstanceProfiles"]])
    for name in (each["InstanceProfileName"] for each in listed or ()):
        if name.startswith(start) and name.endswith(end):
            cluster = name.removeprefix(start).removesuffix(end)
            before = known.get(cluster, Inventory())
            if found := with_profile(clients, cluster, before, is_certain=False):
                known[cluster] = found
    return known
