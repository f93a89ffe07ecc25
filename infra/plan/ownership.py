"""Ownership: a cluster belongs to the SSH key that created it. Pure.

The security group comes first. Its name is unique, and it carries the key's fingerprint. If two commands
create the same cluster at the same time, one of them finds the other's fingerprint and stops without
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from infra.ec2 import tags
from infra.ec2.cluster_record import GENERATION, parse_record
from infra.ec2.inventory import Inventory
from infra.ec2.key_pair import fingerprint
from infra.ec2.network import SecurityGroup
from infra.errors import UsageError
from infra.spec import or_other_name


class ForeignClusterError(UsageError):
    """The cluster belongs to an SSH key that is not on this machine."""


def check_owner(
    cluster: str, found: Inventory, public_key: str, now: datetime, flags: str = ""
) -> None:
    """Raise :class:`ForeignClusterError` if another key has machines or an unexpired record here.

    ``public_key`` is this machine's key for the cluster (type and base64, or empty). ``flags`` are the
    options that select the cluster on the command line.
    """
    own = fingerprint(public_key)
    # Include machines that are shutting down: they still block the group's name.
    owners = [machine.tags.get(tags.OWNER_KEY, "") for machine in found.instances]
    pairs = [pair.public for pair in found.key_pairs if pair.public]
    # A key pair's name is unique in a region, a group's only in its VPC.
    if not (public_key and public_key in pairs):
        living = [group for group in found.security_groups if _is_living(group, now)]
        owners += [group.tags.get(tags.OWNER_KEY, "") for group in living]
        owners += [fingerprint(pair) for pair in pairs] if found.alive or living else []
    foreign = next((owner for owner in owners if owner not in ("", own)), "")
    if not foreign and (own or not found.alive):
        return
    mine = f"this machine has {own}" if own else "this machine has none"
    whose = f" of {found.owner}" if found.owner else ""
    raise ForeignClusterError(
        f"cluster {cluster!r} belongs to another SSH key{f' ({foreign})' if foreign else ''}{whose}; {mine}",
        hint=f"{or_other_name(cluster)}use the machine that made the cluster; if the cluster is yours, "
        f"`spr-cluster down {flags or f'--name {cluster}'}` removes it from any machine",
    )


def _is_living(group: SecurityGroup, now: datetime) -> bool:
    record = parse_record(group.tags)
    return record is not None and not record.is_ended(now)


def split_groups(
    found: Inventory, public_key: str
) -> tuple[SecurityGroup | None, tuple[SecurityGroup, ...]]:
    """Return this key's group, if any, and abandoned groups of other keys."""
    own, groups = fingerprint(public_key), found.security_groups
    ours = [group for group in groups if group.tags.get(tags.OWNER_KEY, own) == own]
    return (ours[0] if ours else None), tuple(group for group in groups if group not in ours)


@dataclass(frozen=True)
class Generation:
    """Distinguishes a cluster from a later one with the same name, by its groups and keys.

    Before a command changes anything, it claims the cluster: it creates the group or increments the
    group's generation tag.
    """

    claims: frozenset[tuple[str, str]]
    """The groups' IDs, each with its generation."""
    keys: frozenset[str]
    """The fingerprints of the owners' SSH keys."""

    @staticmethod
    def of(found: Inventory, public_key: str) -> Generation:
        """``public_key`` is this machine's key for the cluster, or empty."""
        keys = {fingerprint(public_key), *(owner for _, owner in _owners(found))}
        return Generation(frozenset(map(_claim, found.security_groups)), frozenset(keys - {""}))

    def joined_by(self, found: Inventory) -> Generation:
        """Return the generation, with the groups found if EC2 did not list any before."""
        return self if self.claims else replace(self, claims=Generation.of(found, "").claims)

    def find_newer(self, found: Inventory) -> list[str]:
        """Return the IDs of resources that another command has created or claimed since.

        If no group was known before, only the owners' keys decide, because EC2 may list our group late.
        """
        newer = {id_ for id_, owner in _owners(found) if owner and owner not in self.keys}
        groups = found.security_groups if self.claims else ()
        return sorted(newer | {group.id for group in groups if _claim(group) not in self.claims})


def _claim(group: SecurityGroup) -> tuple[str, str]:
    return group.id, group.tags.get(GENERATION, "")


def _owners(found: Inventory) -> Iterator[tuple[str, str]]:
    """Yield each resource's ID and its owner's fingerprint, or "" without one."""
    resources: list[Any] = [item for each in fields(found) for item in getattr(found, each.name)]
    for item in resources:
        public = getattr(item, "public", "")
        yield item.id, fingerprint(public) or getattr(item, "tags", {}).get(tags.OWNER_KEY, "")
