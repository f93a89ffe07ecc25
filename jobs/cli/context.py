"""From a job command's options to the context in which its job runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from cluster.cli.common import open_chosen_cloud, open_context
from cluster.cli.display import make_progress
from cluster.context import Context
from cluster.local_files import utc_now
from cluster.overview import Overview, look_up_prices
from infra.aws.cloud import Cloud
from infra.cost.prices import Prices
from infra.ec2.inventory import describe_inventory
from jobs.cli.job_display import JobDisplay
from jobs.launchers.queue.session import JobContext
from jobs.launchers.record import CloudInfo
from provision.stacks.load import load_stack


def open_job_context(
    args: argparse.Namespace, now: datetime, *, show_cost: bool = False
) -> JobContext:
    """Return the named cluster, its stack, and a display, ready to run jobs.

    Raises :class:`UsageError` if there is no such cluster.
    """
    progress = make_progress()
    cloud = open_chosen_cloud(args)
    ctx = open_context(args, cloud, progress=progress)
    cluster = ctx.find_cluster()
    types = (node.instance.instance_type for node in cluster.nodes)
    prices = look_up_prices(cloud, ctx.clients, types, now)
    info = describe_cloud(cloud, prices, cluster.head.instance.instance_type)
    cost = make_cost(ctx, prices) if show_cost else None
    display = JobDisplay(progress, cost)
    context = JobContext(
        cluster=cluster,
        stack=load_stack(cluster.stack, locked=False),
        open_host=ctx.host_opener(),
        now=now,
        cloud=info,
        progress=progress,
        on_event=display.event,
        on_log=display.log,
        find_expiry=ctx.find_expiry,
        detach=getattr(args, "detach", False),
        verbose=getattr(args, "verbose", False),
    )
    if "on_cluster" in args:
        args.on_cluster(ctx, context)
    return context


def describe_cloud(cloud: Cloud, prices: Prices, instance_type: str) -> CloudInfo:
    """Return the cloud with the price of a type, if that of the region is known."""
    info = CloudInfo(cloud.name, cloud.region, cloud.billed)
    price = prices.machines.get(instance_type)
    if price is None or not price.is_here:
        return info
    return replace(info, usd_per_hour=price.usd, price_source=price.source)


def open_overview(ctx: Context, prices: Prices) -> Overview:
    """Return the cluster as its tags describe it, for its cost and its time left."""
    name = ctx.files.folder.name
    found = describe_inventory(ctx.clients.ec2, name, ("instances", "security_groups"))
    return Overview(name, ctx.cloud.region, found, ctx.cloud.billed, prices)


def make_cost(ctx: Context, prices: Prices) -> Callable[[], float | None]:
    """Return a function for the cluster's cost since its launch, as ``status`` shows it."""
    if not ctx.cloud.billed:
        return lambda: 0.0
    overview = open_overview(ctx, prices)

    def usd_so_far() -> float | None:
        cost = overview.cost(utc_now())
        return cost.usd if cost else None

    return usd_so_far
