"""Create AMIs from running machines without private keys or machine identity; identify their recipes."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.clients import patient, when_visible
from infra.ec2 import images, tags
from infra.errors import CloudError, HostError
from infra.wait import Clock, wait_until
from provision.host import Host, sudo
from provision.install import stack_digest
from provision.stacks.stack import Stack

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import FilterTypeDef

# The machine's identity moves to memory while the disk is copied: an image must not contain host keys,
# keys to other nodes, or a machine id. If this tool dies, its SSH session ends, which also ends the
# seal; if it hangs, the time limit ends the seal.
_SEAL_LIMIT_S = 15 * 60
_SEAL_DEADLINE_S = 10 * 60
# EC2 begins the copy within seconds of the call; until then the disk must not change.
_COPY_BEGINS_DEADLINE_S = 10 * 60
_UNBROKEN = "unbroken"


def begin_image(
    ec2: EC2Client,
    host: Host,
    instance_id: str,
    cluster: str,
    name: str,
    labels: Mapping[str, str] | None = None,
    clock: Clock | None = None,
) -> str:
    """Start creating an image; return its id once its content is fixed and tagged as clean.

    ``labels``, such as the software recipe, become tags. Raises :class:`CloudError` and deletes the
    image if it may contain private keys.
    """
    image_id, snapshots = "", tuple[str, ...]()
    token = secrets.token_hex(8)
    try:
        try:
            # Gigabytes of new software are written to disk here.
            host.run(sudo(_render_seal(token)), timeout_s=_SEAL_DEADLINE_S)
            image_id = images.create_image(ec2, instance_id, cluster, name, labels or {})
            snapshots = _wait_until_copy_begins(ec2, image_id, clock)
        except BaseException:
            with suppress(HostError):  # if unreachable, the machine unseals itself
                _unseal(host, token)
            raise
        if not _unseal(host, token):
            raise CloudError(
                f"image {image_id} was discarded: {host.name} had keys again before its disk was "
                "copied, because the connection broke or something created new ones",
                hint="run the same command again",
            )
        clean = [{"Key": tags.SEALED, "Value": "yes"}]
        when_visible(ec2.create_tags, Resources=[image_id, *snapshots], Tags=clean)
    except BaseException:
        _discard(ec2, image_id, snapshots)
        raise
    return image_id


def _render_seal(token: str) -> str:
    script = resources.files("provision.on_node").joinpath("seal.sh").read_text()
    # The first line is what an error message shows.
    return f"# sealing the disk\ntoken={token}\nlimit_s={_SEAL_LIMIT_S}\n{script}"


def _unseal(host: Host, token: str) -> bool:
    """Restore the machine's identity; return whether the seal held until now."""
    unseal = (
        f"said=$(sh /run/spr-cluster/unseal {token}) && echo $said && "
        f'[ "$said" = {_UNBROKEN} ] && systemctl stop spr-cluster-seal.service; true'
    )
    return host.run(sudo(unseal)).stdout.strip() == _UNBROKEN


def _wait_until_copy_begins(ec2: EC2Client, image_id: str, clock: Clock | None) -> tuple[str, ...]:
    """Wait for the image's snapshots; their content is fixed when they start."""
    # Snapshot descriptions contain the image id.
    of_image: list[FilterTypeDef] = [{"Name": "description", "Values": [f"*{image_id}*"]}]
    snapshots = ec2.get_paginator("describe_snapshots")

    def probe() -> tuple[str, ...] | None:
        pages = snapshots.paginate(OwnerIds=["self"], Filters=of_image, **images.PAGES)
        return tuple(s["SnapshotId"] for page in pages for s in page["Snapshots"]) or None

    what = f"snapshot of image {image_id}"
    return wait_until(what, patient(probe), deadline_s=_COPY_BEGINS_DEADLINE_S, clock=clock)


def _discard(ec2: EC2Client, image_id: str, snapshots: tuple[str, ...]) -> None:
    """Delete what EC2 lets us delete of an unfinished image."""
    if image_id:
        with suppress(ClientError, BotoCoreError):
            ec2.deregister_image(ImageId=image_id)
    for snapshot in snapshots:
        with suppress(ClientError, BotoCoreError):
            ec2.delete_snapshot(SnapshotId=snapshot)


def recipe_digest(stack: Stack, base: str = "") -> str:
    """Return a digest of an image's content, equal on every machine and in every cluster.

    It covers the stack with all versions and indexes, the Ubuntu release, the install and seal
    scripts, and ``base``, anything else that the cloud's machines start from. Canonical's rebuilds of a
    release are excluded; they would invalidate every image several times a month.
    """
    parts = {
        "base": base,
        "ubuntu": stack.ubuntu,
        "install": stack_digest(stack),
        "seal": resources.files("provision.on_node").joinpath("seal.sh").read_text(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
