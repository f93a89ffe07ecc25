"""Finds the cluster where a job runs, and which job a command means."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.chosen_cluster import (
    add_cluster_options,
    open_chosen_cloud,
    open_cloud,
    open_context,
)
from cluster.console.display import make_progress
from cluster.console.output import say
from cluster.context import Context
from cluster.local_files import remembered_cloud, utc_now
from cluster.nodes import Cluster
from cluster.overview import Overview, look_up_prices
from infra.aws.caller import short_owner
from infra.aws.clients import connect
from infra.aws.cloud import DEFAULT_REGION, Cloud
from infra.aws.s3 import connect_s3
from infra.cost.prices import Prices
from infra.ec2.inventory import describe_inventory
from infra.errors import NoClusterError, SprError
from infra.files import read_object
from infra.project_file import read_project_file
from infra.s3_url import parse_s3_url
from infra.wait import Progress, Silent
from jobs.cli.shared.job_display import JobDisplay
from jobs.cli.shared.when_done import keep_nodes, require_limit
from jobs.launchers.bucket import list_stored
from jobs.launchers.launcher import NAME, choose_job
from jobs.launchers.plan import RECORD
from jobs.launchers.queue.launcher import QueueLauncher
from jobs.launchers.queue.session import JobContext
from jobs.launchers.record import CloudInfo
from jobs.train.request import check_results, expand_home
from jobs.train.resume import parse_stored_job
from provision.stacks.load import load_stack

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_ONLY_ACTIVE = "(default: the only queued or running job)"


def add_job_options(
    parser: argparse.ArgumentParser,
    help_: str = _ONLY_ACTIVE,
    *,
    json: bool = True,
    stored: bool = False,
) -> None:
    """Add the optional ``JOB`` and the options that choose its cluster.

    ``stored``: it may be an URL, which :func:`is_stored` recognizes.
    """
    parse = _job_id_or_url if stored else _job_id
    parser.add_argument("job", nargs="?", metavar="JOB", type=parse, help=help_)
    add_cluster_options(parser, json=json)


def add_results_option(container: argparse._ActionsContainer, what: str) -> None:
    """Add ``--results``, the local folder that :func:`choose_results` returns."""
    text = f"local folder for {what} (default: results/JOB)"
    container.add_argument("--results", metavar="DIR", help=text)


def choose_results(args: argparse.Namespace, job: str) -> Path:
    """Return the folder of ``--results``. Raises :class:`UsageError` if the results can't go there."""
    results = expand_home(args.results) if args.results else Path("results", job)
    check_results(results, job)
    return results


def _job_id(text: str) -> str:
    if text and not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a job ID: expected one such as squad-20260731-142501-k3f; "
            "`spr-cluster jobs` lists them"
        )
    return text


def is_stored(job: str | None) -> bool:
    """Return whether a job is named by its URL in S3."""
    return "://" in (job or "")


def _job_id_or_url(text: str) -> str:
    return text if is_stored(text) else _job_id(text)


def open_s3(args: argparse.Namespace, progress: Progress) -> S3Client:
    """Return the S3 of stored jobs: AWS's, or with ``--cloud local`` the embedded cloud's."""
    if args.cloud == "local":
        return connect(open_cloud("local", args.region or DEFAULT_REGION, progress)).s3
    return connect_s3()


def look_in_bucket(args: argparse.Namespace, error: SprError, *, one: bool = False) -> None:
    """Make ``args.job`` the URL of the stored job, or of all, if a cluster is gone or lacks the job.

    The bucket is that of the cluster's record, of spr-cluster.toml, or of a job's record here. With
    ``one``, the default is the newest job. Raises ``error`` if no bucket is known.
    """
    paths = Path("results").glob(f"{args.job or '*'}/job/{RECORD}")
    known = [read_object(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]
    record: dict[str, Any] = next((each for each in reversed(known) if each.get("bucket")), {})
    bucket = str(record.get("bucket", "")) if args.name else ""
    if isinstance(error, NoClusterError):
        bucket = error.bucket or read_project_file().table("cluster").get("bucket") or bucket
    elif not args.job:  # the newest job may be on the cluster
        bucket = ""
    if not bucket:
        raise error
    say(f"{error.message}; looking in {bucket}")
    made_in = (remembered_cloud(args.name) or (record.get("cloud"),))[0]
    args.cloud = args.cloud or ("local" if made_in == "local" else None)
    if one and not args.job:
        stored = list_stored(open_s3(args, Silent()), parse_s3_url(bucket))
        args.job = choose_job(stored, None, f"in {bucket}").job
    args.name, args.job = None, "/".join(filter(None, (bucket.rstrip("/"), args.job)))


def open_launcher(args: argparse.Namespace, progress: Progress | None = None) -> QueueLauncher:
    """Return the queue of the chosen cluster."""
    ctx = open_context(args, open_chosen_cloud(args), progress=progress or Silent())
    cluster = ctx.find_cluster()
    return QueueLauncher(ctx, ctx.host_opener()(cluster.head), cluster.expires)


def open_job_context(
    args: argparse.Namespace, now: datetime, *, show_cost: bool = False
) -> JobContext:
    """Open the named cluster, with its stack and a display, to run jobs.

    Raises :class:`UsageError` if there is no such cluster.
    """
    progress = make_progress()
    cloud = open_chosen_cloud(args)
    ctx = open_context(args, cloud, progress=progress)
    cluster = ctx.find_cluster()
    types = (node.instance.instance_type for node in cluster.nodes)
    prices = look_up_prices(cloud, ctx.clients, types, now)
    info = describe_cloud(cloud, prices, cluster.head.instance.instance_type)
    info = replace(info, owner=short_owner(ctx.clients.caller.owner))
    cost = make_cost(ctx, prices) if show_cost else None
    display = JobDisplay(progress, cost)
    until_done = getattr(args, "until_done", False)
    limit = require_limit(ctx) if until_done else None
    if limit:
        cluster = replace(cluster, expires=limit.ends)
    context = JobContext(
        cluster=cluster,
        stack=load_stack(cluster.stack, locked=False),
        open_host=ctx.host_opener(),
        now=now,
        cloud=info,
        progress=progress,
        on_event=display.event,
        on_log=display.log,
        ssh_config=ctx.files.ssh_config,
        bucket=choose_bucket(args, cluster),
        find_expiry=(lambda: limit.ends) if limit else ctx.find_expiry,
        until_done=until_done,
        max_time=getattr(args, "max_time", None),
        keep_nodes=lambda: keep_nodes(ctx, limit, info, len(cluster.nodes), display.log),
        detach=getattr(args, "detach", False),
        verbose=getattr(args, "verbose", False),
        down_when_done=getattr(args, "detach", False) and args.down_when_done,
        on_finish=(args.on_finish or "") if getattr(args, "detach", False) else "",
    )
    if "on_cluster" in args:
        args.on_cluster(ctx, context)
    return context


def choose_bucket(args: argparse.Namespace, cluster: Cluster) -> str:
    """Return the place of jobs in S3: of ``--bucket``, else of a job resumed by URL, else the cluster's."""
    given = getattr(args, "bucket", "none")
    if given is None and is_stored(getattr(args, "resume", None)):
        given = str(parse_stored_job(args.resume, "--resume")[0])
    url: str = cluster.bucket if given is None else given
    return "" if url == "none" else url.rstrip("/")


def describe_cloud(cloud: Cloud, prices: Prices, instance_type: str) -> CloudInfo:
    """Return the cloud with a type's price, if it is known for the region."""
    info = CloudInfo(cloud.name, cloud.region, cloud.billed)
    price = prices.machines.get(instance_type)
    if price is None or not price.is_here:
        return info
    return replace(info, usd_per_hour=price.usd, price_source=price.source)


def open_overview(ctx: Context, prices: Prices) -> Overview:
    """Return the cluster from its tags, for its cost and remaining time."""
    name = ctx.files.folder.name
    found = describe_inventory(ctx.clients.ec2, name, ("instances", "security_groups"))
    return Overview(name, ctx.cloud.region, found, ctx.cloud.billed, prices)


def make_cost(ctx: Context, prices: Prices) -> Callable[[], float | None]:
    """Return a function that computes the cluster's cost since launch, as ``status`` shows it."""
    if not ctx.cloud.billed:
        return lambda: 0.0
    overview = open_overview(ctx, prices)

    def usd_so_far() -> float | None:
        cost = overview.cost(utc_now())
        return cost.usd if cost else None

    return usd_so_far
