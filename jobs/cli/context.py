"""From a job command's options to the context in which its job runs."""

from __future__ import annotations

import argparse
from datetime import datetime

from cluster.cli.common import open_chosen_cloud, open_context
from cluster.cli.display import make_progress
from cluster.events import utc_now
from cluster.nodes import Cluster
from jobs.cli.job_display import JobDisplay
from jobs.launch.record import CloudInfo
from jobs.launch.session import JobContext
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
    cost = (lambda: usd_so_far(cluster, billed=cloud.billed)) if show_cost else None
    display = JobDisplay(progress, cost)
    return JobContext(
        cluster=cluster,
        stack=load_stack(cluster.stack, locked=False),
        open_host=ctx.host_opener(),
        now=now,
        cloud=CloudInfo(cloud.name, cloud.region, cloud.billed),
        progress=progress,
        on_event=display.event,
        on_log=display.log,
    )


def usd_so_far(cluster: Cluster, *, billed: bool) -> float:
    """Return what the cluster's nodes have cost since their launch, as ``status`` shows it."""
    now = utc_now()
    return sum(node.instance.accrued_usd(now) for node in cluster.nodes) if billed else 0.0
