"""``spr-cluster jobs``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime

from cluster.console.display import format_seconds, format_table
from cluster.console.output import emit, wrap
from cluster.console.parser import SubParsers, add_command
from cluster.job_queue import describe_reason
from cluster.local_files import utc_now
from infra.words import counted
from jobs.cli.chosen_job import add_job_options, open_launcher
from jobs.launchers.launcher import QUEUED, REQUEUED, RUNNING, JobSummary, Launcher, choose_job
from jobs.worker.supervisor.attempt import FAILED

_NEWEST = 10
_EXAMPLES = """\
  spr-cluster jobs
  spr-cluster jobs --name bert --json
  spr-cluster jobs squad-20261122-142501-k3f
  spr-cluster jobs --context lab --namespace ml
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "jobs",
        "List the jobs on a cluster, oldest first, or show one. A job is submitting, queued, running,\n"
        "succeeded, failed (with its exit code), cancelled, requeued (it lost a rank or node, and will run\n"
        "again), or lost (it left the queue and nothing says how it ended, for example because the head was\n"
        "shut down). A job with a checkpoint and without a model can be resumed:\n"
        "`spr-cluster train squad --resume JOB`.",
        _EXAMPLES,
        run=run,
    )
    add_job_options(parser, "show only this one, with its pods if it is on Kubernetes")
    parser.add_argument(
        "--all", action="store_true", help=f"list all jobs, not only the newest {_NEWEST}"
    )


def run(args: argparse.Namespace) -> int:
    launcher, now = open_launcher(args), utc_now()
    found = launcher.list_jobs()
    if args.job:
        job = choose_job(found, args.job, launcher.place)
        more, lines = launcher.describe(job)
        result: Mapping[str, object] = {**launcher.where, **job.as_dict(), **more}
        # Problems say more than the cause that a list has room for.
        own = _table([job], now) if more.get("problems") else render([job], now)
        text = "\n".join([own, *lines])
    else:
        result = {**launcher.where, "jobs": [job.as_dict() for job in found]}
        text = _render_list(launcher, found, now, every=args.all)
    emit(args, text, result)
    return 0


def _render_list(
    launcher: Launcher, found: Sequence[JobSummary], now: datetime, *, every: bool
) -> str:
    if not found:
        start = f"spr-cluster {launcher.example} {launcher.flags}".rstrip()
        return f"No jobs {launcher.place}. `{start}` starts one."
    shown = found if every else newest(found)
    lines = [render(shown, now)]
    if hidden := len(found) - len(shown):
        lines.append(f"{counted(hidden, 'earlier job')}: --all")
    if launcher.outlook and any(job.is_active for job in found):
        lines.append(wrap(launcher.outlook))
    return "\n".join(lines)


def newest(found: Sequence[JobSummary]) -> Sequence[JobSummary]:
    """Return the jobs that have not ended, and the newest of the others."""
    return [job for job in found if job.is_active or job in found[-_NEWEST:]]


def render(found: Sequence[JobSummary], now: datetime) -> str:
    """Return the jobs as a table, and the causes of failures below it."""
    causes = [f"{job.job}: {_describe(job)}" for job in found if _describe(job)]
    return "\n".join([_table(found, now), *causes])


def _table(found: Sequence[JobSummary], now: datetime) -> str:
    rows = [("JOB", "STATE", "NODES", "BEGAN", "TOOK", "ON DISK", "MODEL", "CHECKPOINT")]
    rows += [_row(job, now) for job in found]
    return format_table(rows, ("ON DISK", "NODES", "TOOK"))


def _row(job: JobSummary, now: datetime) -> tuple[str, str, str, str, str, str, str, str]:
    ended = job.ended or (now if job.state == RUNNING else None)
    took = (ended - job.began).total_seconds() if ended and job.began else None
    return (
        job.job,
        job.state if job.exit_code is None or job.state != FAILED else f"failed ({job.exit_code})",
        str(len(job.nodes) or "-"),
        f"{format_seconds(max(0.0, (now - job.began).total_seconds()))} ago" if job.began else "-",
        "-" if took is None else format_seconds(max(0.0, took)),
        "-" if job.size_kib is None else f"{job.size_kib / 1024:,.1f} MiB",
        "yes" if job.has_model else "-",
        job.checkpoint or "-",
    )


def _describe(job: JobSummary) -> str:
    """Return why a job failed or waits; "" for other jobs."""
    if job.state in (QUEUED, REQUEUED) and job.waits_for:
        return f"waits: {describe_reason(job.waits_for)}"
    return job.cause if job.state == FAILED else ""
