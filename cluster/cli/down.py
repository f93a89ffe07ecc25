"""``spr-cluster down``."""

from __future__ import annotations

import argparse
import json
import sys

from cluster.cli.common import (
    add_cluster_options,
    confirm,
    open_chosen_cloud,
    open_context,
    record_failure,
)
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.wrapping import wrap
from cluster.context import Context
from cluster.lifecycle.down import Removed, down
from cluster.local_files import nearest_cluster
from cluster.losses import find_losses
from infra.guard import describe_cluster

_EXAMPLES = """\
  spr-cluster down
  spr-cluster down --name bert --yes --keep-image
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "down",
        "Remove a cluster: its nodes, image, snapshots, groups, and keys. It is found by its tags, so\n"
        "`down` works from any machine and in any unfinished state. At the end, EC2 is searched for\n"
        "anything that is left. It asks first if the machines cost money, if a job is running, and if\n"
        "results exist only on the nodes.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.add_argument(
        "--keep-image",
        action="store_true",
        help="keep the image and its snapshot, so a later `up` with this stack starts from it",
    )
    parser.add_argument("--yes", "-y", action="store_true", help="remove without asking")
    parser.set_defaults(run=run)


def _down(ctx: Context, args: argparse.Namespace) -> Removed:
    try:
        return down(ctx, args.name, keep_image=args.keep_image)
    except BaseException as failure:
        raise record_failure(ctx, failure) from None


def _confirm(ctx: Context, name: str) -> None:
    """Ask, if the cluster is billed or a job or its results would be lost."""
    found = describe_cluster(ctx.clients, name)
    losses = find_losses(ctx, found)
    asks = bool(found and ctx.cloud.billed) or bool(losses.found)
    lines = [f"Cluster {name} in {ctx.cloud.region}: {found}"] if asks else []
    for line in (*lines, *losses.describe(ctx.flags)):
        print(wrap(line, stream=sys.stderr), file=sys.stderr)
    if asks:
        confirm("Remove everything?", yes=False)


def run(args: argparse.Namespace) -> int:
    progress = make_progress()
    cloud = open_chosen_cloud(args, progress=progress)
    ctx = open_context(args, cloud, progress=progress)
    with ctx.files.lock(args.verb):
        if not args.yes:
            _confirm(ctx, args.name)
        with progress.phase(f"Remove cluster {args.name}"):
            removed = _down(ctx, args)
    kept = removed.kept
    if args.json:
        print(json.dumps({"cluster": args.name, "removed": removed.ids, "kept": kept.ids()}))
    elif kept:
        print(f"Kept: {kept}")
    elif removed.ids:
        print(f"Nothing left of cluster {args.name}.")
    else:
        place = f"{cloud.name} {cloud.region}{nearest_cluster(args.name)}"
        print(f"Nothing of cluster {args.name} exists in {place}.")
    return 0
