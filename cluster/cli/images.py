"""``spr-cluster images``: list and delete images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cluster.cli.chosen_cluster import CloudRequest, open_place, other_owner
from cluster.console.display import format_seconds, format_table, make_progress
from cluster.console.options import YES, argument, switch
from cluster.console.output import confirm, emit, say
from cluster.console.parser import Parser, add_request
from cluster.lifecycle.images import OurImage, choose_images, delete_images, describe_our_images
from cluster.local_files import utc_now
from infra.aws.caller import Caller, short_owner
from infra.aws.clients import Clients, changing, connect
from infra.aws.cloud import Cloud
from infra.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ImagesRequest(CloudRequest):
    """Show every image that this tool made in a region, by any user, from its tags; or delete some. A
    cluster that starts from an image installs nothing. Every cluster with the same recipe uses a
    kept image, which costs only its snapshot: a few cents per GiB and month. The image of a cluster
    that has machines is not deleted. Images of stacks in another folder's spr-cluster.toml count as
    unused.

    examples:
      spr-cluster images --region eu-west-1
      spr-cluster images --delete ami-0123456789abcdef0
      spr-cluster images --delete --unused --yes
    """

    ids: tuple[str, ...] = argument(
        "to delete, such as ami-0123456789abcdef0",
        (),
        takes="*",
        metavar="IMAGE",
        needs="--delete",
    )
    delete: bool = switch("delete these images and their snapshots")
    unused: bool = switch(
        "with --delete: all images that no `up` would use, because they failed, were never finished, or "
        "have a recipe that no current stack has",
        needs="--delete",
    )
    yes: bool = switch(
        "delete without asking; with --unused, only images that you made",
        flags=YES,
        needs="--delete",
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "images", run, ImagesRequest)


def run(request: ImagesRequest) -> int:
    return _delete(request) if request.delete else _list(request)


def _open(request: CloudRequest) -> tuple[Cloud, Clients, Sequence[OurImage]]:
    """Return the cloud, its clients, and our images there."""
    cloud = open_place(request.cloud or "aws", request.region, make_progress())
    clients = connect(cloud)
    return cloud, clients, describe_our_images(cloud, clients.ec2)


def _list(request: ImagesRequest) -> int:
    cloud, _, images = _open(request)
    now = utc_now()
    where = f"--cloud {cloud.name} --region {cloud.region}"
    text = f"No images in {cloud.name} {cloud.region}. To make one: spr-cluster bake {where}"
    if images:
        text = _table(images, now)
    if any(image.is_useless for image in images):
        command = f"spr-cluster images --delete --unused {where}"
        text += f"\nTo delete images that no `up` would use: {command}"
    emit(request, text, {"region": cloud.region, "images": [i.as_dict(now) for i in images]})
    return 0


def _table(images: Sequence[OurImage], now: datetime) -> str:
    rows = [
        ("IMAGE", "STACK", "RECIPE", "PACKAGES", "STATE", "KEPT", "CLUSTER", "AGE", "DISK", "OWNER")
    ]
    for image in images:
        row = image.as_dict(now)
        rows.append(
            (
                row["image"],
                row["stack"] or "?",
                row["recipe"] or "?",
                row["packages"].partition(" ")[2] or "-",
                row["state"],
                "yes" if row["kept"] else "with its cluster",
                row["cluster"],
                "-" if row["age_s"] is None else format_seconds(row["age_s"]),
                f"{row['disk_gib']} GiB",
                short_owner(image.owner) or "-",
            )
        )
    return format_table(rows)


def _delete(request: ImagesRequest) -> int:
    if bool(request.ids) == request.unused:
        raise UsageError("expected the IDs of images, or --unused")
    cloud, clients, found = _open(request)
    if request.unused:
        images = tuple(image for image in found if image.is_useless)
        if request.yes:
            images = _leave_others(cloud, clients.caller, images)
    else:
        images = choose_images(found, request.ids)
    if images and not request.json:
        print(_table(images, utc_now()), file=sys.stderr)
    if images:
        confirm("Delete these images?", yes=request.yes or not cloud.billed)
    where = f"--cloud {cloud.name} --region {cloud.region}"
    left = f"`spr-cluster images {where}` and `spr-cluster gc {where}` show what is left"
    with changing(left):
        delete_images(clients.ec2, images, make_progress())
    ids = [image.image.id for image in images]
    text = f"Deleted: {', '.join(ids)}." if ids else "Nothing to delete."
    emit(request, text, {"region": cloud.region, "deleted": ids})
    return 0


def _leave_others(cloud: Cloud, caller: Caller, images: Sequence[OurImage]) -> tuple[OurImage, ...]:
    """Return the caller's images. Those of others may hold the stack of a project that isn't here."""
    others = [our.image.id for our in images if other_owner(caller, our.owner)]
    if others:
        command = f"spr-cluster images --delete {' '.join(others)}"
        where = f"--cloud {cloud.name} --region {cloud.region}"
        say(f"Not deleted: images that others made. To delete them: {command} {where}")
    return tuple(our for our in images if our.image.id not in others)
