"""Ownership: a cluster belongs to the SSH key that it was made with. Pure.

The security group is created first, labeled with the key's fingerprint, and EC2 accepts its name once.
Of two commands that create the same cluster at the same time, one therefore finds the other's
fingerprint; it stops, and changes nothing.
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


class ForeignClusterError(UsageError):
    """The cluster belongs to an SSH key that is not on this machine."""


def check_owner(
    cluster: str, found: Inventory, public_key: str, now: datetime, flags: str = ""
) -> None:
    """Raise :class:`ForeignClusterError` if another key's owner has machines or an unexpired record.

    ``public_key`` is this machine's key for the cluster (type and base64, or empty); ``flags`` name the
    cluster in a command.
    """
    own = fingerprint(public_key)
    # Machines that shut down hold the group, and nothing can take its name.
    owners = [machine.tags.get(tags.OWNER_KEY, "") for machine in found.instances]
    pairs = [pair.public for pair in found.key_pairs if pair.public]
    # A key pair's name is unique in a region. A group's is unique in its network only.
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
        hint="choose another --name, or use the machine that made the cluster; if the cluster is yours, "
        f"`spr-cluster down {flags or f'--name {cluster}'}` removes it from any machine",
    )


def _is_living(group: SecurityGroup, now: datetime) -> bool:
    record = parse_record(group.tags)
    return record is not None and not record.is_over(now)


def split_groups(
    found: Inventory, public_key: str
) -> tuple[SecurityGroup | None, tuple[SecurityGroup, ...]]:
    """Return this key's group, if any, and those of other keys, which are abandoned."""
    own, groups = fingerprint(public_key), found.security_groups
    ours = [group for group in groups if group.tags.get(tags.OWNER_KEY, own) == own]
    return (ours[0] if ours else None), tuple(group for group in groups if group not in ours)


@dataclass(frozen=True)
class Generation:
    """What tells a cluster from a later one of the same name: its groups, as last changed, and its keys.

    A command claims a cluster before it changes anything: it creates the group or counts up its tag.
    """

    claims: frozenset[tuple[str, str]]
    """The groups' IDs, each with its count of changes."""
    keys: frozenset[str]
    """The fingerprints of the owners' SSH keys."""

    @staticmethod
    def of(found: Inventory, public_key: str) -> Generation:
        """``public_key`` is this machine's key for the cluster, or empty."""
        keys = {fingerprint(public_key), *(owner for _, owner in _owners(found))}
        return Generation(frozenset(map(_claim, found.security_groups)), frozenset(keys - {""}))

    def joined_by(self, found: Inventory) -> Generation:
        """Return the generation with the groups that EC2 lists only now."""
        return self if self.claims else replace(self, claims=Generation.of(found, "").claims)

    def find_newer(self, found: Inventory) -> list[str]:
        """Return the IDs of what another command has made or claimed since.

        A first group that EC2 lists late belongs to the cluster if one of its keys does.
        """
        newer = {id_ for id_, owner in _owners(found) if owner and owner not in self.keys}
        groups = found.security_groups if self.claims else ()
        return sorted(newer | {group.id for group in groups if _claim(group) not in self.claims})


def _claim(group: SecurityGroup) -> tuple[str, str]:
    return group.id, group.tags.get(GENERATION, "")


def _owners(found: Inventory) -> Iterator[tuple[str, str]]:
    """Yield the ID of each resource, and its owner's fingerprint; "" if it is not labeled."""
    resources: list[Any] = [item for each in fields(found) for item in getattr(found, each.name)]
    for item in resources:
        public = getattr(item, "public", "")
        yield item.id, fingerprint(public) or getattr(item, "tags", {}).get(tags.OWNER_KEY, "")
