"""``spr-cluster list`` and ``gc``: all clusters of an account, and the forgotten ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from cluster.cli.common import add_cloud_options, confirm
from cluster.cli.display import format_seconds, format_table, make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.context import Context
from cluster.events import utc_now
from cluster.lifecycle.down import down
from cluster.local_files import ClusterFiles
from cluster.overview import Overview, describe_regions, list_clusters
from infra.clients import connect, translate_boto_error
from infra.cloud import Cloud
from infra.errors import SprError
from infra.open_cloud import open_cloud
from infra.words import counted

_LIST_EXAMPLES = """\
  spr-cluster list
  spr-cluster list --all-regions --json
"""
_GC_EXAMPLES = """\
  spr-cluster gc                        show forgotten clusters, and ask
  spr-cluster gc --all-regions --yes
  spr-cluster gc --all                  also unfinished clusters and kept images
"""


def add_parser(subparsers: SubParsers) -> None:
    list_ = add_command(
        subparsers,
        "list",
        "Show every cluster in the account that this tool created, whoever ran it, from its tags.",
        _LIST_EXAMPLES,
    )
    _add_options(list_)
    list_.set_defaults(run=run_list)
    gc = add_command(
        subparsers,
        "gc",
        "Find expired clusters and leftovers of clusters, and offer to remove them. A cluster that is\n"
        "running or being created is never touched.",
        _GC_EXAMPLES,
    )
    _add_options(gc)
    gc.add_argument(
        "--all",
        action="store_true",
        help="also clusters that have no machines but have not expired, and kept images",
    )
    gc.add_argument("--yes", "-y", action="store_true", help="remove without asking")
    gc.set_defaults(run=run_gc)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_cloud_options(parser)
    parser.add_argument(
        "--all-regions", action="store_true", help="every region that the account can use"
    )


def _search(args: argparse.Namespace) -> tuple[Cloud, tuple[Overview, ...]]:
    progress = make_progress()
    cloud = open_cloud(args.cloud or "aws", args.region, progress)
    regions = describe_regions(cloud) if args.all_regions else (cloud.region,)
    with progress.phase(f"Search {', '.join(regions)}"):
        clusters, closed = list_clusters(cloud, regions)
    for region, reason in closed.items():
        print(f"{region} could not be searched: {reason}", file=sys.stderr)
    return cloud, clusters


def run_list(args: argparse.Namespace) -> int:
    cloud, clusters = _search(args)
    now = utc_now()
    if args.json:
        print(json.dumps({"cloud": cloud.name, "clusters": [c.as_dict(now) for c in clusters]}))
        return 0
    where = "any region" if args.all_regions else cloud.region
    if not clusters:
        print(f"No clusters in {cloud.name}, {where}.")
        return 0
    print(_table(clusters, now))
    total = sum(cluster.usd_so_far(now) for cluster in clusters)
    if cloud.billed:
        print(f"${total:.2f} so far for the machines that exist now, at on-demand prices.")
    if any(cluster.is_orphan(now) for cluster in clusters):
        print("To remove expired clusters: spr-cluster gc")
    return 0


def _table(clusters: Sequence[Overview], now: datetime) -> str:
    rows = [("NAME", "REGION", "STATE", "NODES", "AGE", "ENDS IN", "COST")]
    for cluster in clusters:
        row = cluster.as_dict(now)
        wanted = "?" if row["wanted_nodes"] is None else row["wanted_nodes"]
        left = row["left_s"]
        rows.append(
            (
                cluster.name,
                cluster.region,
                row["state"],
                f"{row['nodes']}/{wanted}",
                "-" if row["age_s"] is None else format_seconds(row["age_s"]),
                "-" if left is None or left < 0 else format_seconds(left),
                f"${row['usd_so_far']:.2f}",
            )
        )
    return format_table(rows)


def run_gc(args: argparse.Namespace) -> int:
    cloud, clusters = _search(args)
    now = utc_now()
    wanted = [c for c in clusters if c.is_orphan(now) or (args.all and not c.found.alive)]
    for cluster in wanted:
        print(
            f"{cluster.name} ({cluster.region}, {cluster.state(now)}): {cluster.found}",
            file=sys.stderr,
        )
    if wanted and cloud.billed:
        confirm("Remove all of these?", yes=args.yes)
    failed = _remove_all(cloud, wanted)
    left = [cluster for cluster, _ in failed]
    names = [cluster.name for cluster in wanted if cluster not in left]
    if args.json:
        print(json.dumps({"cloud": cloud.name, "removed": names}))
    elif names or not wanted:
        print(f"Removed: {', '.join(names)}." if names else "No forgotten clusters.")
    rest = [c for c in clusters if c not in wanted and not c.found.alive]
    if rest and not args.json:
        print(f"Not removed (use --all): {', '.join(c.name for c in rest)}")
    if failed:
        lines = "".join(f"\n  {c.name} ({c.region}): {reason}" for c, reason in failed)
        raise SprError(f"{len(failed)} of {counted(len(wanted), 'cluster')} not removed:{lines}")
    return 0


def _remove_all(cloud: Cloud, clusters: Sequence[Overview]) -> list[tuple[Overview, SprError]]:
    """Remove clusters, each regardless of the others; return those that failed, and why."""
    failed = []
    for cluster in clusters:
        try:
            _remove(cloud, cluster)
        except Exception as error:
            reason = error if isinstance(error, SprError) else translate_boto_error(error)
            if reason is None:
                raise
            failed.append((cluster, reason))
    return failed


def _remove(cloud: Cloud, cluster: Overview) -> None:
    there = replace(cloud, region=cluster.region)
    progress = make_progress()
    files = ClusterFiles.of(cluster.name)
    with files.lock(), progress.phase(f"Remove cluster {cluster.name}"):
        ctx = Context(there, connect(there), files, progress, command="gc")
        down(ctx, cluster.name)
