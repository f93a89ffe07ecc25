"""``spr-cluster images``: list, delete, and prune images."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from cluster.cli.common import add_cloud_options, confirm, open_place
from cluster.cli.display import format_seconds, format_table, make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.lifecycle.images import OurImage, choose_images, delete_images, describe_our_images
from cluster.local_files import utc_now
from infra.aws.clients import connect
from infra.aws.cloud import Cloud
from infra.wait import Progress

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client


_EXAMPLES = """\
  spr-cluster images list
  spr-cluster images delete ami-0123456789abcdef0
  spr-cluster images prune --yes
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "images",
        "A cluster that starts from an image installs nothing. A kept image is used by every cluster\n"
        "with the same recipe. It costs what its snapshot costs: a few cents per GiB and month.",
        _EXAMPLES,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    list_ = add_command(
        actions,
        "list",
        "Show every image that this tool made in a region, whoever ran it, from its tags.",
        "  spr-cluster images list\n  spr-cluster images list --region eu-west-1 --json\n",
        help_="show all images that this tool made in a region",
    )
    add_cloud_options(list_)
    list_.set_defaults(run=run_list)
    delete = add_command(
        actions,
        "delete",
        "Delete images by their IDs, and the snapshots that hold their content.",
        "  spr-cluster images delete ami-0123456789abcdef0 --yes\n",
        help_="delete images and their snapshots",
    )
    delete.add_argument("ids", nargs="+", metavar="IMAGE", help="such as ami-0123456789abcdef0")
    prune = add_command(
        actions,
        "prune",
        "Delete images that failed, were never finished, or hold a recipe that no stack has now. Your\n"
        "own stacks are those in this folder's spr-cluster.toml: the image of a stack defined only in\n"
        "another folder, or on a colleague's laptop, counts as outdated. The image of a cluster that\n"
        "has machines is kept.",
        "  spr-cluster images prune\n  spr-cluster images prune --yes --json\n",
        help_="delete images that no `up` would use",
    )
    for each, run in ((delete, run_delete), (prune, run_prune)):
        add_cloud_options(each)
        each.add_argument("--yes", "-y", action="store_true", help="delete without asking")
        each.set_defaults(run=run)


@dataclass(frozen=True)
class _ImageStore:
    """A region and the images in it."""

    cloud: Cloud
    ec2: EC2Client
    progress: Progress
    images: tuple[OurImage, ...]


def _open(args: argparse.Namespace) -> _ImageStore:
    progress = make_progress()
    cloud = open_place(args.cloud or "aws", args.region, progress)
    ec2 = connect(cloud).ec2
    return _ImageStore(cloud, ec2, progress, describe_our_images(cloud, ec2))


def run_list(args: argparse.Namespace) -> int:
    place = _open(args)
    cloud, images, now = place.cloud, place.images, utc_now()
    where = f"--cloud {cloud.name} --region {cloud.region}"
    if args.json:
        print(json.dumps({"region": cloud.region, "images": [i.as_dict(now) for i in images]}))
    elif not images:
        print(f"No images in {cloud.name} {cloud.region}. To make one: spr-cluster bake {where}")
    else:
        print(_table(images, now))
        if any(image.is_useless for image in images):
            print(f"To delete images that no `up` would use: spr-cluster images prune {where}")
    return 0


def _table(images: Sequence[OurImage], now: datetime) -> str:
    rows = [("IMAGE", "STACK", "RECIPE", "STATE", "KEPT", "CLUSTER", "AGE", "DISK")]
    for image in images:
        row = image.as_dict(now)
        rows.append(
            (
                row["image"],
                row["stack"] or "?",
                row["recipe"] or "?",
                row["state"],
                "yes" if row["kept"] else "with its cluster",
                row["cluster"],
                "-" if row["age_s"] is None else format_seconds(row["age_s"]),
                f"{row['disk_gib']} GiB",
            )
        )
    return format_table(rows)


def run_delete(args: argparse.Namespace) -> int:
    place = _open(args)
    return _delete(args, place, choose_images(place.images, args.ids))


def run_prune(args: argparse.Namespace) -> int:
    place = _open(args)
    return _delete(args, place, [image for image in place.images if image.is_useless])


def _delete(args: argparse.Namespace, place: _ImageStore, images: Sequence[OurImage]) -> int:
    if images and not args.json:
        print(_table(images, utc_now()), file=sys.stderr)
    if images:
        confirm("Delete these images?", yes=args.yes or not place.cloud.billed)
    delete_images(place.ec2, images, place.progress)
    ids = [image.image.id for image in images]
    if args.json:
        print(json.dumps({"region": place.cloud.region, "deleted": ids}))
    else:
        print(f"Deleted: {', '.join(ids)}." if ids else "Nothing to delete.")
    return 0
