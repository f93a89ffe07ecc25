"""``spr-cluster list`` and ``gc``: all clusters of this machine and of an account, and the forgotten ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from cluster.cli.common import add_cloud_options, confirm
from cluster.cli.display import format_seconds, format_table, make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.context import Context
from cluster.events import utc_now
from cluster.lifecycle.down import down
from cluster.local_files import ClusterFiles, known_clusters
from cluster.overview import Overview, describe_regions, list_clusters
from cluster.prices import show_cost
from infra.clients import connect, translate_boto_error
from infra.cloud import Cloud
from infra.errors import SprError, UsageError
from infra.inventory import describe_inventory
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
        "Show every cluster that this machine made, on AWS and on the embedded cloud, and every other\n"
        "one that this tool created in the AWS account, whoever ran it, from its tags.",
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


@dataclass(frozen=True)
class _Search:
    """The clouds that were searched, the clusters found, and the error of a cloud that did not answer."""

    places: Mapping[str, Sequence[str]]
    """The regions that were searched, by cloud."""
    found: Sequence[tuple[Cloud, Overview]]
    failure: SprError | None

    @property
    def cloud(self) -> str | None:
        """The cloud's name, if only one was searched."""
        return next(iter(self.places)) if len(self.places) == 1 else None

    @property
    def billed(self) -> bool:
        return any(cloud.billed for cloud, _ in self.found)


def _search(args: argparse.Namespace) -> _Search:
    """Search the chosen cloud; by default AWS, and every cloud in which this machine made a cluster.

    A cloud that can't be used here is noted if there is another. Raises the error of the only one.
    """
    clouds = {cloud for cloud, _ in known_clusters().values()} | {"aws"}
    names = [args.cloud] if args.cloud else sorted(clouds)
    places: dict[str, Sequence[str]] = {}
    found: list[tuple[Cloud, Overview]] = []
    failures: list[SprError] = []
    for name in names:
        try:
            cloud, places[name], clusters = _search_cloud(name, args)
        except Exception as error:
            reason = error if isinstance(error, SprError) else translate_boto_error(error)
            if reason is None or len(names) == 1:
                raise
            failures.append(reason)
            _note_failure(name, reason)
            continue
        found += [(cloud, cluster) for cluster in clusters]
    if not places:
        raise failures[0]
    # A cloud that is not set up here is no failure: nobody expects its clusters.
    failed = [error for error in failures if not isinstance(error, UsageError)]
    return _Search(places, found, failed[0] if failed else None)


def _search_cloud(
    name: str, args: argparse.Namespace
) -> tuple[Cloud, Sequence[str], Sequence[Overview]]:
    progress = make_progress()
    cloud = open_cloud(name, args.region, progress)
    regions: Sequence[str] = (cloud.region,)
    if args.all_regions:
        regions = describe_regions(cloud)
    elif not args.region:
        there = [region for _, region in known_clusters(name).values()]
        regions = tuple(dict.fromkeys([cloud.region, *there]))
    with progress.phase(f"Search {name} {', '.join(regions)}"):
        clusters, closed = list_clusters(cloud, regions)
    for region, reason in closed.items():
        print(f"{region} could not be searched: {reason}", file=sys.stderr)
    return cloud, regions, clusters


def _note_failure(cloud: str, reason: SprError) -> None:
    there = known_clusters(cloud)
    known = f"; {', '.join(there)} {'is' if len(there) == 1 else 'are'} there" if there else ""
    print(f"{cloud} was not searched: {reason.message}{known}", file=sys.stderr)


def run_list(args: argparse.Namespace) -> int:
    search = _search(args)
    now = utc_now()
    if args.json:
        rows = [{**each.as_dict(now), "cloud": cloud.name} for cloud, each in search.found]
        print(json.dumps({"cloud": search.cloud, "clusters": rows}))
    else:
        _print_clusters(search, now, all_regions=args.all_regions)
    if search.failure:
        raise search.failure
    return 0


def _print_clusters(search: _Search, now: datetime, *, all_regions: bool) -> None:
    if not search.found:
        places = search.places.items()
        where = [f"{c}, {'any region' if all_regions else ', '.join(r)}" for c, r in places]
        print(f"No clusters in {'; '.join(where)}.")
        return
    print(_table(search.found, now))
    if search.billed:
        print(_total([cluster for _, cluster in search.found], now))
    if any(cluster.is_orphan(now) for _, cluster in search.found):
        print("To remove expired clusters: spr-cluster gc")


def _table(clusters: Sequence[tuple[Cloud, Overview]], now: datetime) -> str:
    rows = [("NAME", "CLOUD", "REGION", "STATE", "NODES", "AGE", "ENDS IN", "COST")]
    for cloud, cluster in clusters:
        row = cluster.as_dict(now)
        wanted = "?" if row["wanted_nodes"] is None else row["wanted_nodes"]
        left = row["left_s"]
        rows.append(
            (
                cluster.name,
                cloud.name,
                cluster.region,
                row["state"],
                f"{row['nodes']}/{wanted}",
                "-" if row["age_s"] is None else format_seconds(row["age_s"]),
                "-" if left is None or left < 0 else format_seconds(left),
                show_cost(row),
            )
        )
    return format_table(rows)


def _total(clusters: Sequence[Overview], now: datetime) -> str:
    """Return the cost of the machines that exist, and the sources of its prices."""
    costs = [cost for cluster in clusters if (cost := cluster.cost(now))]
    sources = dict.fromkeys(cost.source for cost in costs if cost.source)
    text = f"${sum(cost.usd for cost in costs):.2f} so far for the machines that exist now, at on-demand"
    text += f" prices ({'; '.join(sources)})." if sources else " prices."
    return text if len(costs) == len(clusters) else f"{text} Some prices are unknown."


def run_gc(args: argparse.Namespace) -> int:
    search = _search(args)
    now = utc_now()
    wanted = [
        (cloud, each) for cloud, each in search.found if _is_wanted(each, now, unfinished=args.all)
    ]
    for _, cluster in wanted:
        print(
            f"{cluster.name} ({cluster.region}, {cluster.state(now)}): {cluster.found}",
            file=sys.stderr,
        )
    if any(cloud.billed for cloud, _ in wanted):
        confirm("Remove all of these?", yes=args.yes)
    failed = _remove_all(wanted, unfinished=args.all)
    left = [cluster for cluster, _ in failed]
    names = [cluster.name for _, cluster in wanted if cluster not in left]
    if args.json:
        print(json.dumps({"cloud": search.cloud, "removed": names}))
    elif names or not wanted:
        print(f"Removed: {', '.join(names)}." if names else "No forgotten clusters.")
    rest = [c for cloud, c in search.found if (cloud, c) not in wanted and not c.found.alive]
    if rest and not args.json:
        print(f"Not removed (use --all): {', '.join(c.name for c in rest)}")
    if failed:
        lines = "".join(f"\n  {c.name} ({c.region}): {reason}" for c, reason in failed)
        raise SprError(f"{len(failed)} of {counted(len(wanted), 'cluster')} not removed:{lines}")
    if search.failure:
        raise search.failure
    return 0


def _remove_all(
    clusters: Sequence[tuple[Cloud, Overview]], *, unfinished: bool
) -> list[tuple[Overview, SprError]]:
    """Remove clusters, each regardless of the others; return those that failed, and why."""
    failed = []
    for cloud, cluster in clusters:
        try:
            _remove(cloud, cluster, unfinished=unfinished)
        except Exception as error:
            reason = error if isinstance(error, SprError) else translate_boto_error(error)
            if reason is None:
                raise
            failed.append((cluster, reason))
    return failed


def _is_wanted(cluster: Overview, now: datetime, *, unfinished: bool) -> bool:
    """Whether ``gc`` removes a cluster; ``unfinished`` includes those that never had a machine."""
    return cluster.is_orphan(now) or (unfinished and not cluster.found.alive)


def _remove(cloud: Cloud, cluster: Overview, *, unfinished: bool) -> None:
    there = replace(cloud, region=cluster.region)
    progress = make_progress()
    files = ClusterFiles.of(cluster.name)
    with files.lock("gc"), progress.phase(f"Remove cluster {cluster.name}"):
        ctx = Context(there, connect(there), files, progress, command="gc")
        # Its owner may have renewed it while this command was asking.
        found = describe_inventory(ctx.clients.ec2, cluster.name)
        if found and not _is_wanted(
            replace(cluster, found=found), ctx.now(), unfinished=unfinished
        ):
            raise SprError("it is in use again")
        down(ctx, cluster.name)
