"""Finds the cluster where a job runs, and which job a command means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.cli.chosen_cluster import ClusterRequest, choose_cluster, open_cloud, open_cluster
from cluster.console.display import make_progress
from cluster.console.options import argument
from cluster.console.output import say
from cluster.context import Context
from cluster.local_files import remembered_cloud, utc_now
from cluster.nodes import Cluster
from cluster.overview import Overview, look_up_prices
from infra.aws.caller import short_owner
from infra.aws.clients import connect
from infra.aws.cloud import DEFAULT_REGION, Cloud
from infra.aws.s3 import connect_s3
from infra.cost.prices import Price, Prices, with_spot
from infra.ec2.inventory import describe_inventory, describe_terminated
from infra.errors import NoClusterError, SprError, UsageError
from infra.files import read_object
from infra.project_file import read_project_file
from infra.s3_url import parse_s3_url
from infra.wait import Progress, Silent
from jobs.cli.shared.job_display import JobDisplay
from jobs.cli.shared.job_limit import find_limit, keep_limit
from jobs.cli.shared.job_options import QueueRequest
from jobs.cli.shared.when_done import OnCluster
from jobs.places.bucket import list_stored
from jobs.places.launcher import NAME, LostFilesError, choose_job
from jobs.places.plan import RECORD
from jobs.places.queue.launcher import QueueLauncher
from jobs.places.queue.session import JobContext
from jobs.places.record import CloudInfo
from jobs.report.receipt import add_receipt
from jobs.train.request import check_results, expand_home
from provision.stacks.load import load_stack

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


def parse_job_id(text: str) -> str:
    """Parse a job's ID. Raises ``ValueError`` for a text that can't be one."""
    if text and not NAME.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a job ID: expected one such as squad-20260731-142501-k3f; "
            "`spr-cluster jobs` lists them"
        )
    return text


def parse_job_or_url(text: str) -> str:
    """Parse a job's ID, or its URL in S3."""
    return text if is_stored(text) else parse_job_id(text)


def job_argument(help_: str, parse: Callable[[str], str] = parse_job_id) -> Any:
    """Return the field of the optional ``JOB``."""
    return argument(help_, None, metavar="JOB", parse=parse)


@dataclass(frozen=True, kw_only=True)
class JobRequest(ClusterRequest):
    """A request about a job on a cluster."""

    job: str | None = job_argument("(default: the only queued or running job)")


def choose_results(results: str | None, job: str) -> Path:
    """Return the folder of ``--results``. Raises :class:`UsageError` if the results can't go there."""
    folder = expand_home(results) if results else Path("results", job)
    check_results(folder, job)
    return folder


def is_stored(job: str | None) -> bool:
    """Return whether a job is named by its URL in S3."""
    return "://" in (job or "")


def open_s3(request: ClusterRequest, progress: Progress) -> S3Client:
    """Return the S3 of stored jobs: AWS's, or with ``--cloud local`` the embedded cloud's."""
    if request.cloud == "local":
        return connect(open_cloud("local", request.region or DEFAULT_REGION, progress)).s3
    return connect_s3()


Asks = TypeVar("Asks", bound=JobRequest)


def _read_records(job: str) -> Iterator[dict[str, Any]]:
    """Yield the records in ./results, of one job or of all."""
    for path in Path("results").glob(f"{job or '*'}/job/{RECORD}"):
        with suppress(UsageError):  # such as an empty file after a crash of this machine
            yield read_object(path)


def look_in_bucket(request: Asks, error: SprError, *, one: bool = False) -> Asks:
    """Return a request for the URL of the stored job, or of all, if a cluster is gone or lacks its files.

    The bucket is that of the cluster's record, of the record here of the job or of the cluster's newest
    job, or of spr-cluster.toml. With ``one``, the default is the cluster's newest job; all are listed
    from the newest bucket. Raises ``error`` if there is none.
    """
    job = error.job if isinstance(error, LostFilesError) else request.job or ""
    name = choose_cluster(request, tell=lambda _: None)
    made_in, made_where = remembered_cloud(name) or (None, None)
    region = request.region or (made_where if request.cloud in (None, made_in) else None)
    asked = {"cluster": name, "cloud": request.cloud or made_in, "region": region}
    known = [*_read_records(job)]
    # Another cluster's job says nothing about this cluster's bucket.
    ours = [
        each
        for each in known
        if all(value in (None, each.get(key)) for key, value in asked.items())
    ]
    lists_all = not (one or job)
    stored = [each for each in ours if lists_all and each.get("bucket")]
    among = known if job else stored or ours
    record = max(among, key=lambda each: str(each.get("when", "")), default={})
    bucket = str(record.get("bucket", ""))
    if isinstance(error, NoClusterError):
        file = read_project_file().table("cluster")
        of_file = file.get("bucket") if file.get("name", name) == name else None
        bucket = error.bucket or bucket
        if not bucket and (lists_all or "bucket" not in record):
            bucket = of_file or ""
        last, is_fetched = record.get("job"), record.get("state")
        may_say = record in ours and all(asked.values()) and (is_fetched or error.is_gone)
        if not bucket and may_say:
            left = f"are in results/{last}" if is_fetched else "were lost with its nodes"
            why = f"job {last} had no bucket, and its results {left}"
            raise NoClusterError(f"{error.message}; {why}", error.hint or "")
    elif isinstance(error, LostFilesError):
        bucket = error.bucket
    elif not job:  # the newest job may be on the cluster
        bucket = ""
    if not bucket:
        raise error
    say(f"{error.message}; looking in {bucket}")
    made_in = made_in or record.get("cloud")
    cloud = request.cloud or ("local" if made_in == "local" else None)
    found = replace(request, name=None, cloud=cloud)
    if one and not job:
        listed = list_stored(open_s3(found, Silent()), parse_s3_url(bucket), name)
        job = choose_job(listed, None, f"of cluster {name} in {bucket}").job
    return replace(found, job="/".join(filter(None, (bucket.rstrip("/"), job))))


def open_launcher(request: ClusterRequest, progress: Progress | None = None) -> QueueLauncher:
    """Return the queue of a cluster."""
    ctx = open_cluster(request, progress)
    cluster = ctx.find_cluster()
    return QueueLauncher(ctx, ctx.host_opener()(cluster.head), cluster.expires, cluster.job_ends)


def open_job_context(
    request: ClusterRequest,
    now: datetime,
    *,
    show_cost: bool = False,
    on_cluster: OnCluster = lambda _ctx, _job: None,
) -> JobContext:
    """Open the named cluster, with its stack and a display, to run jobs.

    Raises :class:`UsageError` if there is no such cluster.
    """
    progress = make_progress()
    ctx = open_cluster(request, progress)
    cloud, cluster = ctx.cloud, ctx.find_cluster()
    types = (node.instance.instance_type for node in cluster.nodes)
    prices = look_up_prices(cloud, ctx.clients, types, now)
    info = describe_cloud(cloud, prices, cluster, lambda: with_spot(prices, ctx.clients.ec2, now))
    labels = tuple(cluster.options.get("labels", ()))
    info = replace(info, owner=short_owner(ctx.clients.caller.owner), tags=labels)
    cost = make_cost(ctx, prices) if show_cost else None
    display = JobDisplay(progress, cost)
    queued = request if isinstance(request, QueueRequest) else None
    # What is left of a resumed job's limits is in its record.
    asked = (queued.max_time, queued.budget) if queued and queued.is_new else (None, None)
    if limit := find_limit(ctx, cluster, prices, *asked):
        cluster = replace(cluster, expires=limit.ends(None))
    context = JobContext(
        cluster=cluster,
        stack=load_stack(cluster.stack, locked=False),
        open_host=ctx.host_opener(),
        now=now,
        cloud=info,
        progress=progress,
        on_event=display.event,
        on_log=display.log,
        find_ssh_config=partial(ctx.learn_nodes, cluster),
        find_expiry=ctx.find_expiry,
        find_job_end=ctx.find_job_end,
        is_gone=ctx.is_gone,
        count_former_s=lambda after: (
            ctx.events.former_s(cluster.created, after) if cluster.created else 0.0
        ),
        keep_limit=lambda plan, least_s: keep_limit(
            ctx, cluster, prices, plan, least_s, display.log
        ),
        add_receipt=add_receipt,
        detach=bool(queued and queued.detach),
    )
    on_cluster(ctx, context)
    return context


def describe_cloud(
    cloud: Cloud, prices: Prices, cluster: Cluster, ask_spot: Callable[[], Prices]
) -> CloudInfo:
    """Return the cloud with the price of the cluster's nodes, if it is known for the region.

    The price of nodes on spot is today's; without it, they cost at most what they cost on demand.
    """
    info = CloudInfo(cloud.name, cloud.region, cloud.billed)
    machines, head = [node.instance for node in cluster.nodes], cluster.head.instance
    price = prices.listed((head.instance_type,), cluster.options)
    if price is None or not price.is_here:
        return info
    info = replace(info, usd_per_hour=price.usd, price_source=price.source)
    share = sum(bool(machine.spot_request) for machine in machines) / len(machines)
    if not share:
        return info
    spot = ask_spot().market(*head.place, spot=True)
    if spot is None:
        return replace(info, market="at most, on spot")
    listed = prices.machines[head.instance_type].usd
    market = "on spot" if share == 1 else f"{share:.0%} on spot"
    return replace(info, usd_per_hour=price.usd - share * (listed - spot), market=market)


def open_overview(ctx: Context, prices: Prices) -> Overview:
    """Return the cluster from its tags, for its cost and remaining time."""
    name = ctx.name
    found = describe_inventory(ctx.clients.ec2, name, ("instances", "security_groups"))
    terminated = describe_terminated(ctx.clients.ec2).get(name, ())
    return Overview(name, ctx.cloud.region, found, ctx.cloud.billed, prices, terminated)


def make_cost(ctx: Context, prices: Prices) -> Callable[[], Price | None]:
    """Return a function that computes the cluster's cost so far, as ``status`` shows it."""
    if not ctx.cloud.billed:
        return lambda: Price(0.0, "")
    overview = open_overview(ctx, prices)
    return lambda: overview.cost(utc_now())
