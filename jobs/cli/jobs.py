"""``spr-cluster jobs``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.display import format_seconds, format_table
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.wrapping import wrap
from cluster.job_queue import describe_reason
from infra.words import counted
from jobs.launchers.job_state import FAILED, QUEUED, REQUEUED, RUNNING
from jobs.launchers.queue.expiry import describe_expiry
from jobs.launchers.queue.history import JobSummary, list_jobs

_NEWEST = 10
_EXAMPLES = """\
  spr-cluster jobs
  spr-cluster jobs --name bert --json
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "jobs",
        "List the jobs on a cluster, oldest first. A job is submitting, queued, running, succeeded,\n"
        "failed (with its exit code), cancelled, requeued (it lost a rank or node, and will run again), or\n"
        "lost (it left the queue and nothing says how it ended, for example because the head was shut\n"
        "down). A job with a checkpoint and without a model can be resumed:\n"
        "`spr-cluster train squad --resume JOB`.",
        _EXAMPLES,
    )
    parser.add_argument(
        "--all", action="store_true", help=f"list all jobs, not only the newest {_NEWEST}"
    )
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    ctx = open_context(args, open_chosen_cloud(args))
    cluster = ctx.find_cluster()
    found = list_jobs(ctx.host_opener()(cluster.head))
    if args.json:
        print(json.dumps({"cluster": args.name, "jobs": [job.as_dict() for job in found]}))
    elif found:
        shown = found if args.all else newest(found)
        print(render(shown, ctx.now()))
        if hidden := len(found) - len(shown):
            print(f"{counted(hidden, 'earlier job')}: --all")
        if cluster.expires and any(job.is_active for job in found):
            print(wrap(describe_expiry(cluster.expires, ctx.now(), cluster.flags)))
    else:
        print(f"No jobs on cluster {args.name}. `spr-cluster train squad {ctx.flags}` starts one.")
    return 0


def newest(found: Sequence[JobSummary]) -> Sequence[JobSummary]:
    """Return the jobs that have not ended, and the newest of the others."""
    return [job for job in found if job.is_active or job in found[-_NEWEST:]]


def render(found: Sequence[JobSummary], now: datetime) -> str:
    """Return the jobs as a table, and the causes of failures below it."""
    rows = [("JOB", "STATE", "NODES", "BEGAN", "TOOK", "ON DISK", "MODEL", "CHECKPOINT")]
    rows += [_row(job, now) for job in found]
    causes = [f"{job.job}: {_describe(job)}" for job in found if _describe(job)]
    return "\n".join([format_table(rows, ("ON DISK", "NODES", "TOOK")), *causes])


def _row(job: JobSummary, now: datetime) -> tuple[str, str, str, str, str, str, str, str]:
    ended = job.ended or (now if job.state == RUNNING else None)
    took = (ended - job.began).total_seconds() if ended and job.began else None
    return (
        job.job,
        job.state if job.exit_code is None or job.state != FAILED else f"failed ({job.exit_code})",
        str(len(job.nodes)) if job.nodes else "-",
        f"{format_seconds(max(0.0, (now - job.began).total_seconds()))} ago" if job.began else "-",
        "-" if took is None else format_seconds(max(0.0, took)),
        f"{job.size_kib / 1024:,.1f} MiB",
        "yes" if job.has_model else "-",
        job.checkpoint or "-",
    )


def _describe(job: JobSummary) -> str:
    """Return why a job failed or waits; "" for other jobs."""
    if job.state in (QUEUED, REQUEUED):
        return f"waits: {describe_reason(job.waits_for)}"
    return job.cause if job.state == FAILED else ""
