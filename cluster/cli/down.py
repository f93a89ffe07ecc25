"""``spr-cluster down`` and ``extend``: remove a cluster, or extend its time to live."""

from __future__ import annotations

import argparse
import functools
import shlex
from datetime import timedelta

from cluster.cli.chosen_cluster import (
    add_cluster_options,
    confirm_owner,
    find_other_owner,
    open_cluster,
    record_failure,
)
from cluster.console.display import make_progress
from cluster.console.output import confirm, emit, say, wrap
from cluster.console.parser import SubParsers, add_command, add_yes_option
from cluster.context import Context
from cluster.lifecycle.deadline import describe_lifetime, extend
from cluster.lifecycle.down import Removed, down
from cluster.local_files import nearest_cluster
from cluster.slurm.job_queue import find_losses
from infra.ec2.inventory import Inventory, describe_inventory
from infra.ec2.tags import render_time
from infra.errors import UsageError
from infra.spec import LONGEST_TTL
from infra.words import parse_duration

_DOWN_EXAMPLES = """\
  spr-cluster down
  spr-cluster down --name bert --yes --keep-image
"""
_EXTEND_EXAMPLES = """\
  spr-cluster extend 2h
  spr-cluster extend 30m --name bert
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "down",
        "Remove a cluster: its nodes, image, snapshots, groups, and keys. `down` finds them by their\n"
        "tags, so it works from any machine and in any unfinished state. At the end, it checks EC2 for\n"
        "leftovers. It asks first if the machines cost money, if somebody else made the cluster, if a\n"
        "job is running, or if results exist only on the nodes.",
        _DOWN_EXAMPLES,
        run=run_down,
    )
    add_cluster_options(parser)
    parser.add_argument(
        "--keep-image",
        action="store_true",
        help="keep the image and its snapshot, so a later `up` with this stack starts from it",
    )
    add_yes_option(parser, "remove without asking")
    parser = add_command(
        subparsers,
        "extend",
        "Extend the time to live of a cluster, on its nodes and in its tags.",
        _EXTEND_EXAMPLES,
        run=run_extend,
    )
    parser.add_argument("time", help="how much longer: 90m, 2h, 1d")
    add_cluster_options(parser)
    text = "with --name: do not ask, even if somebody else made the cluster"
    add_yes_option(parser, text)


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
    """Ask if the cluster costs money or is somebody else's, or if jobs or results would be lost.

    Returns the inventory that the user saw.
    """
    name = args.name
    found = describe_inventory(ctx.clients.ec2, name)
    losses = find_losses(ctx, found)
    billed = bool(found and ctx.cloud.billed)
    asks = billed or bool(losses.found) or bool(find_other_owner(ctx.clients.caller, found))
    lost = [*losses.describe(ctx.flags)]
    for line in ([f"Cluster {name} in {ctx.cloud.region}: {found}"] if asks else []) + lost:
        say(line)
    if not confirm_owner(ctx, args, found) and asks:
        confirm("Remove everything?", yes=False, about=" ".join(lost))
    return found


def remove_cluster(ctx: Context, args: argparse.Namespace) -> Removed:
    """Remove a cluster and verify that nothing is left; ask first, unless ``--yes`` was given."""
    with ctx.files.lock(ctx.command):
        approved = None if args.yes else _confirm(ctx, args)
        with ctx.progress.phase(f"Remove cluster {args.name}"):
            return _down(ctx, args, approved)


def run_down(args: argparse.Namespace) -> int:
    progress = make_progress()
    ctx = open_cluster(args, progress)
    removed = remove_cluster(ctx, args)
    kept = removed.kept
    text = f"Kept: {kept}" if kept else f"Nothing left of cluster {args.name}."
    if not kept and not removed.ids:
        text = _describe_nothing(ctx)
    emit(args, text, {"cluster": args.name, "removed": removed.ids, "kept": kept.ids()})
    return 0


def _describe_nothing(ctx: Context) -> str:
    cloud, folder = ctx.cloud, ctx.files.folder
    place = f"{cloud.name} {cloud.region}{nearest_cluster(folder.name)}"
    text = f"Nothing of cluster {folder.name} exists in {place}."
    if not ctx.files.key.exists():
        return text
    key = (
        f"This machine keeps the cluster's key, because the cluster may be in another account than "
        f"{ctx.clients.caller.account}. If another machine has removed it: rm -r {shlex.quote(str(folder))}"
    )
    return f"{text}\n{wrap(key)}"


def run_extend(args: argparse.Namespace) -> int:
    more = parse_duration(args.time, "extend")
    if not timedelta(minutes=1) <= more <= LONGEST_TTL:
        raise UsageError(f"extend {args.time}: expected from 1m to 30d")
    ctx = open_cluster(args, make_progress())
    with ctx.files.lock(args.verb):
        record = extend(ctx, args.name, more, functools.partial(confirm_owner, ctx, args))
    ends = describe_lifetime(record, ctx.now())
    text = wrap(f"Nodes of cluster {args.name} shut down automatically {ends}")
    times = {"expires": render_time(record.expires), "latest": render_time(record.latest)}
    emit(args, text, {"cluster": args.name, **times})
    return 0
