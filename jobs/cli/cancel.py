"""``spr-cluster cancel``."""

from __future__ import annotations

import argparse
import json
import shlex

from cluster.cli.common import add_cluster_options
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from jobs.cli.chosen_job import add_job_argument, open_job
from jobs.cli.job_display import JobDisplay
from jobs.launch.follow import stop_job
from jobs.launch.history import (
    LOST,
    RUNNING,
    JobSummary,
    choose_active,
    choose_job,
    list_jobs,
)
from jobs.launch.plan import STOP_SECONDS, JobPaths
from jobs.launch.queue import SlurmLauncher
from jobs.train.train import CHECKPOINT_SECONDS, RESUME

_EXAMPLES = """\
  spr-cluster cancel
  spr-cluster cancel --now                            do not wait for a checkpoint
  spr-cluster cancel squad-20260731-142501-k3f --name bert
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "cancel",
        "End a job on all nodes, or remove it from the queue. A training job saves a checkpoint first.\n"
        "What is left after two minutes (other jobs: ten seconds), or after Ctrl-C, is killed, even if\n"
        "nodes are gone. If there is no job, nothing happens.",
        _EXAMPLES,
    )
    add_job_argument(parser)
    parser.add_argument("--now", action="store_true", help="kill it without waiting")
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    progress = make_progress()
    ctx, head, found = open_job(args, choose_active, progress)
    launcher = SlurmLauncher(head, ctx.flags)
    silent: tuple[str, ...] = ()
    ends = found is not None and (found.is_active or found.state == LOST)
    if found and ends:
        waits = args.now or found.state != RUNNING
        grace = 0 if waits else CHECKPOINT_SECONDS if found.unfinished else STOP_SECONDS
        log = JobDisplay(progress).log
        with progress.phase(f"End {found.job}"):
            silent = stop_job(launcher, JobPaths(found.job), grace, log)
        found = choose_job(list_jobs(head), found.job)
    if args.json:
        result = {"cluster": args.name, "cancelled": ends, "unreachable": silent}
        print(json.dumps({**result, **(found.as_dict() if found else {"job": None})}))
    else:
        print(_render(found, args.name, ctx.flags, ended=ends))
    return 0


def _render(found: JobSummary | None, cluster: str, flags: str, *, ended: bool) -> str:
    """Return in one or two lines what was done, and how the job continues."""
    if found is None:
        return f"No job is running or queued on cluster {cluster}."
    if not ended:
        return f"Job {found.job} has ended already: it is {found.state}."
    lines = [f"Job {found.job} has ended."]
    if found.unfinished:
        kept = f"Checkpoint {found.checkpoint} is saved" if found.checkpoint else "No checkpoint"
        lines.append(f"{kept}. To resume: {shlex.join(RESUME)} {found.job} {flags}")
    return "\n".join(lines)
