"""``spr-cluster wait``."""

from __future__ import annotations

import argparse
import json

from cluster.cli.common import add_cluster_options
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command, positive_int
from cluster.context import Context
from infra.errors import HostError, HostKeyError, JobError
from infra.progress import Progress
from infra.wait import wait_until
from jobs.cli.chosen_job import add_job_argument, open_job
from jobs.launchers.job_state import SUCCEEDED
from jobs.launchers.queue.expiry import explain_expiry
from jobs.launchers.queue.history import JobSummary, choose_all, choose_job, choose_some, list_jobs
from provision.host import Host

_WEEK_S = 7 * 24 * 3600
_EXAMPLES = """\
  spr-cluster wait squad-20260731-142501-k3f && spr-cluster down --yes --name spr
  spr-cluster wait --timeout 3600
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "wait",
        "Wait until a job ends, without its output. The exit code is 0 if it succeeded, otherwise 1.",
        _EXAMPLES,
    )
    add_job_argument(parser)
    parser.add_argument("--all", action="store_true", help="wait for all jobs that run or wait")
    parser.add_argument(
        "--timeout",
        type=positive_int,
        default=_WEEK_S,
        metavar="SECONDS",
        help="give up after this time; the job goes on (default: a week)",
    )
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    progress = make_progress()
    ctx, head, chosen = open_job(args, choose_all if args.all else choose_some, progress)
    done = [_wait_for(args, ctx, head, job.job, progress) for job in chosen]
    rows = [job.as_dict() for job in done]
    if args.json:
        print(json.dumps({"jobs": rows} if args.all else rows[0] if rows else {"job": None}))
    elif not chosen:
        print("No job is running or queued.")
    for job in done:
        if job.state == SUCCEEDED and not args.json:
            fetch = f"spr-cluster fetch {job.job} {ctx.flags}"
            print(f"Job {job.job} succeeded. To download its results: {fetch}")
    failed = [job for job in done if job.state != SUCCEEDED]
    if failed:
        raise JobError(
            "; ".join(
                f"job {j.job} is {j.state}{f': {j.cause}' if j.cause else ''}" for j in failed
            ),
            hint=f"its log: spr-cluster logs {failed[0].job} {ctx.flags}",
        )
    return 0


def _wait_for(
    args: argparse.Namespace, ctx: Context, head: Host, job: str, progress: Progress
) -> JobSummary:
    def ended() -> JobSummary | None:
        try:
            now = choose_job(list_jobs(head), job)
        except HostKeyError:
            raise
        except HostError as error:
            if gone := head.why_gone():
                over = explain_expiry(job, ctx.find_expiry(), ctx.now(), ctx.flags, gone)
                raise over or JobError(f"job {job} ended with its head node: {gone}") from None
            progress.note(f"{error.message}; reconnecting")
            return None
        progress.note(now.state)
        return None if now.is_active else now

    with progress.phase(f"Wait for {job}"):
        return wait_until(f"job {job}", ended, deadline_s=args.timeout, every_s=5)
