"""``spr-cluster down`` and ``extend``: remove a cluster, or extend its time to live."""

from __future__ import annotations

import functools
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

from cluster.cli.chosen_cluster import (
    ClusterRequest,
    confirm_owner,
    open_cluster,
    other_owner,
    record_failure,
)
from cluster.console.display import make_progress
from cluster.console.options import YES, argument, switch
from cluster.console.output import confirm, emit, say, wrap
from cluster.console.parser import Parser, add_request
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


@dataclass(frozen=True, kw_only=True)
class DownRequest(ClusterRequest):
    """Remove a cluster: its nodes, image, snapshots, groups, and keys. `down` finds them by their
    tags, so it works from any machine and in any unfinished state. At the end, it checks EC2 for
    leftovers. It asks first if the machines cost money, if another user made the cluster, if a
    job is running, if results exist only on the nodes, or if this machine lacks the key to check.

    examples:
      spr-cluster down
      spr-cluster down --name bert --yes --keep-image
    """

    keep_image: bool = switch(
        "keep the image and its snapshot, so a later `up` with this stack starts from it"
    )
    yes: bool = switch("remove without asking", flags=YES)


@dataclass(frozen=True, kw_only=True)
class ExtendRequest(ClusterRequest):
    """Extend the time to live of a cluster, on its nodes and in its tags.

    examples:
      spr-cluster extend 2h
      spr-cluster extend 30m --name bert
    """

    time: str = argument("how much longer: 90m, 2h, 1d")
    yes: bool = switch("with --name: do not ask, even if another user made the cluster", flags=YES)


def add_parser(parent: Parser) -> None:
    add_request(parent, "down", run_down, DownRequest)
    add_request(parent, "extend", run_extend, ExtendRequest)


def run_down(request: DownRequest) -> int:
    ctx = open_cluster(request, make_progress(), yes=request.yes)
    sure = request.yes and request.is_named
    removed = remove_cluster(ctx, yes=request.yes, sure=sure, keep_image=request.keep_image)
    kept = removed.kept
    text = f"Kept: {kept}" if kept else f"Nothing left of cluster {ctx.name}."
    if not kept and not removed.ids:
        text = _describe_nothing(ctx)
    emit(request, text, {"cluster": ctx.name, "removed": removed.ids, "kept": kept.ids()})
    return 0


def remove_cluster(ctx: Context, *, yes: bool, sure: bool, keep_image: bool = False) -> Removed:
    """Remove a cluster and verify that nothing is left; ask first, unless the user said ``yes``.

    Another user's is removed without asking only if the user is ``sure``: see :func:`confirm_owner`.
    """
    with ExitStack() as lock:
        try:
            lock.enter_context(ctx.files.lock(ctx.command))
        except OSError as error:
            say(f"{error}; no other command may use the cluster meanwhile")
        approved = None if yes else _confirm(ctx)
        # What appears only after an empty search may be another user's.
        approve = functools.partial(confirm_owner, ctx, sure=sure)
        with ctx.progress.phase(f"Remove cluster {ctx.name}"):
            try:
                return down(ctx, keep_image=keep_image, approve=approve, approved=approved)
            except UsageError:
                # Not confirmed, so there is nothing to record.
                raise
            except BaseException as failure:
                raise record_failure(ctx, failure) from None


def _confirm(ctx: Context) -> Inventory:
    """Ask if the cluster costs money or is another user's, or if jobs or results would be lost.

    Returns the inventory that the user saw.
    """
    found = describe_inventory(ctx.clients.ec2, ctx.name)
    losses = find_losses(ctx, found)
    billed = bool(found and ctx.cloud.billed)
    # A head that only doesn't answer must not keep a free cluster.
    asks = billed or bool(losses.found) or losses.is_savable
    asks = asks or bool(other_owner(ctx.clients.caller, found.owner))
    lost = [*losses.describe(ctx.flags)]
    for line in ([f"Cluster {ctx.name} in {ctx.cloud.region}: {found}"] if asks else []) + lost:
        say(line)
    if not confirm_owner(ctx, found, sure=False) and asks:
        confirm("Remove everything?", yes=False, about=" ".join(lost))
    return found


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


def run_extend(request: ExtendRequest) -> int:
    more = parse_duration(request.time, "extend")
    if not timedelta(minutes=1) <= more <= LONGEST_TTL:
        raise UsageError(f"extend {request.time}: expected from 1m to 30d")
    ctx = open_cluster(request, make_progress(), yes=request.yes)
    sure = request.yes and request.is_named
    with ctx.files.lock(request.verb):
        record = extend(ctx, more, functools.partial(confirm_owner, ctx, sure=sure))
    ends = describe_lifetime(record, ctx.now())
    text = wrap(f"Nodes of cluster {ctx.name} shut down automatically {ends}")
    times = {"expires": render_time(record.expires), "latest": render_time(record.latest)}
    emit(request, text, {"cluster": ctx.name, **times})
    return 0
