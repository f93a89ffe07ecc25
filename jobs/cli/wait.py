"""``spr-cluster wait``."""

from __future__ import annotations

import argparse
import json

from cluster.cli.common import add_cluster_options
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command, positive_int
from infra.errors import HostError, HostKeyError, JobError
from infra.wait import wait_until
from jobs.cli.chosen_job import add_job_argument, open_job
from jobs.launch.ending import SUCCEEDED
from jobs.launch.expiry import explain_expiry
from jobs.launch.history import JobSummary, choose_active, choose_job, list_jobs

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
    ctx, head, found = open_job(args, choose_active, progress)
    if found is None:
        print(json.dumps({"job": None}) if args.json else "No job is running or queued.")
        return 0
    job = found.job

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
        done = wait_until(f"job {job}", ended, deadline_s=args.timeout, every_s=5)
    if args.json:
        print(json.dumps(done.as_dict()))
    if done.state != SUCCEEDED:
        where = f": {done.cause}" if done.cause else ""
        raise JobError(
            f"job {job} is {done.state}{where}",
            hint=f"its log: spr-cluster logs {job} {ctx.flags}",
        )
    if not args.json:
        print(f"Job {job} succeeded. To download its results: spr-cluster fetch {job} {ctx.flags}")
    return 0
