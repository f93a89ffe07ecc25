"""``spr-cluster wait``."""

from __future__ import annotations

import argparse
import json

from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command, positive_int
from infra.errors import JobError, SprError, UsageError
from infra.wait import Progress, wait_until
from jobs.cli.chosen_job import add_job_options, open_launcher
from jobs.launchers.job_state import SUCCEEDED
from jobs.launchers.launcher import JobSummary, Launcher, choose_several

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
    add_job_options(parser)
    parser.add_argument("--all", action="store_true", help="wait for all jobs that run or wait")
    parser.add_argument(
        "--timeout",
        type=positive_int,
        default=_WEEK_S,
        metavar="SECONDS",
        help="give up after this time; the job goes on (default: a week)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    progress = make_progress()
    launcher = open_launcher(args, progress)
    chosen = choose_several(launcher.list_jobs(), args.job, launcher.place, every=args.all)
    done = [_wait_for(launcher, job.job, args.timeout, progress) for job in chosen]
    rows = [job.as_dict() for job in done]
    if args.json:
        print(json.dumps({"jobs": rows} if args.all else rows[0] if rows else {"job": None}))
    elif not chosen:
        print("No job is running or queued.")
    for job in done:
        if job.state == SUCCEEDED and not args.json:
            fetch = f"spr-cluster fetch {job.job} {launcher.flags}".rstrip()
            print(f"Job {job.job} succeeded. To download its results: {fetch}")
    failed = [job for job in done if job.state != SUCCEEDED]
    if failed:
        raise JobError(
            "; ".join(
                f"job {j.job} is {j.state}{f': {j.cause}' if j.cause else ''}" for j in failed
            ),
            hint=f"its log: spr-cluster logs {failed[0].job} {launcher.flags}".rstrip(),
        )
    return 0


def _wait_for(launcher: Launcher, job: str, timeout_s: int, progress: Progress) -> JobSummary:
    def ended() -> JobSummary | None:
        try:
            found = {each.job: each for each in launcher.list_jobs()}
        except UsageError:
            raise
        except SprError as error:
            if over := launcher.explain_loss(job, error):
                raise over from None
            progress.note(f"{error.message}; reconnecting")
            return None
        if job not in found:
            raise JobError(f"job {job} was deleted before it ended")
        progress.note(found[job].state)
        return None if found[job].is_active else found[job]

    with progress.phase(f"Wait for {job}"):
        return wait_until(f"job {job}", ended, deadline_s=timeout_s, every_s=5)
