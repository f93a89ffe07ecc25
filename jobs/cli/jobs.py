"""``spr-cluster jobs``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.display import format_seconds, format_table
from cluster.cli.parser import SubParsers, add_command
from jobs.launch.history import JobSummary, list_jobs

_EXAMPLES = """\
  spr-cluster jobs
  spr-cluster jobs --name bert --json
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "jobs",
        "List the jobs on a cluster's head, oldest first. A job is running, done, failed (with its\n"
        "exit code), or lost (ended without one, for example because the node was shut down). A job\n"
        "with a checkpoint and without a model can be resumed: `spr-cluster train squad --resume JOB`.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    ctx = open_context(args, open_chosen_cloud(args))
    head = ctx.host_opener()(ctx.find_cluster().head)
    found = list_jobs(head)
    if args.json:
        print(json.dumps({"cluster": args.name, "jobs": [job.as_dict() for job in found]}))
    elif found:
        print(render(found, ctx.now()))
    else:
        print(f"No jobs on cluster {args.name}. `spr-cluster train squad {ctx.flags}` starts one.")
    return 0


def render(found: Sequence[JobSummary], now: datetime) -> str:
    """Return the jobs as a table."""
    rows = [("JOB", "STATE", "BEGAN", "TOOK", "ON DISK", "MODEL", "CHECKPOINT")]
    for job in found:
        failed = job.state == "failed"
        ended = job.ended or (now if job.state == "running" else None)
        rows.append(
            (
                job.job,
                f"failed ({job.exit_code})" if failed else job.state,
                f"{format_seconds(max(0.0, (now - job.began).total_seconds()))} ago",
                format_seconds(max(0.0, (ended - job.began).total_seconds())) if ended else "-",
                f"{job.size_kib / 1024:,.1f} MiB",
                "yes" if job.has_model else "-",
                job.checkpoint or "-",
            )
        )
    return format_table(rows)
