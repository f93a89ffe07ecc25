"""``spr-cluster down``."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys

from cluster.cli.accounts import confirm_owner, find_other_owner
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
from cluster.job_queue import find_losses
from cluster.lifecycle.down import Removed, down
from cluster.local_files import nearest_cluster
from infra.ec2.inventory import Inventory, describe_inventory
from infra.errors import UsageError

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
        "anything that is left. It asks first if the machines cost money, if somebody else made the\n"
        "cluster, if a job is running, and if results exist only on the nodes.",
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


def _down(ctx: Context, args: argparse.Namespace, approved: Inventory | None) -> Removed:
    try:
        approve = functools.partial(confirm_owner, ctx, args) if args.yes else lambda _: None
        keep = args.keep_image
        return down(ctx, args.name, keep_image=keep, approve=approve, approved=approved)
    except UsageError:
        # Not confirmed, so there is nothing to record.
        raise
    except BaseException as failure:
        raise record_failure(ctx, failure) from None


def _confirm(ctx: Context, args: argparse.Namespace) -> Inventory:
    """Ask, if the cluster is billed or somebody else's, or a job or its results would be lost.

    Returns what was shown.
    """
    name = args.name
    found = describe_inventory(ctx.clients.ec2, name)
    losses = find_losses(ctx, found)
    billed = bool(found and ctx.cloud.billed)
    asks = billed or bool(losses.found) or bool(find_other_owner(ctx, found))
    lines = [f"Cluster {name} in {ctx.cloud.region}: {found}"] if asks else []
    for line in (*lines, *losses.describe(ctx.flags)):
        print(wrap(line, stream=sys.stderr), file=sys.stderr)
    if not confirm_owner(ctx, args, found) and asks:
        confirm("Remove everything?", yes=False)
    return found


def remove_cluster(ctx: Context, args: argparse.Namespace) -> Removed:
    """Remove a cluster, after questions unless ``--yes`` answers them; at the end nothing is left."""
    with ctx.files.lock(ctx.command):
        approved = None if args.yes else _confirm(ctx, args)
        with ctx.progress.phase(f"Remove cluster {args.name}"):
            return _down(ctx, args, approved)


def run(args: argparse.Namespace) -> int:
    progress = make_progress()
    cloud = open_chosen_cloud(args, progress=progress)
    ctx = open_context(args, cloud, progress=progress)
    removed = remove_cluster(ctx, args)
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
        if ctx.files.key.exists():
            print(wrap(_describe_key(ctx)))
    return 0


def _describe_key(ctx: Context) -> str:
    folder = ctx.files.folder
    return (
        f"This machine keeps the cluster's key, because account {ctx.clients.caller.account} may not be "
        f"where the cluster is. If another machine has removed it: rm -r {shlex.quote(str(folder))}"
    )
