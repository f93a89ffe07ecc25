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
from jobs.launchers.job_state import LOST, RUNNING
from jobs.launchers.plan import CHECKPOINT_SECONDS, STOP_SECONDS, JobPaths
from jobs.launchers.queue.history import JobSummary, choose_all, choose_job, choose_some, list_jobs
from jobs.launchers.queue.job_output import stop_job
from jobs.launchers.queue.slurm import SlurmLauncher
from jobs.train.train import resume_command, task_of

_EXAMPLES = """\
  spr-cluster cancel
  spr-cluster cancel --now                            do not wait for a checkpoint
  spr-cluster cancel --all
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
    parser.add_argument("--all", action="store_true", help="end all jobs that run or wait")
    parser.add_argument("--now", action="store_true", help="kill it without waiting")
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    progress = make_progress()
    ctx, head, chosen = open_job(args, choose_all if args.all else choose_some, progress)
    launcher = SlurmLauncher(head, ctx.flags)
    results = []
    # Those that wait first: they would start on the nodes of the others.
    ordered = sorted(chosen, key=lambda job: job.state == RUNNING)
    for found in (*ordered,) or (None,):
        now, silent = found, tuple[str, ...]()
        ends = found is not None and (found.is_active or found.state == LOST)
        if found and ends:
            waits = args.now or found.state != RUNNING
            grace = 0 if waits else CHECKPOINT_SECONDS if found.unfinished else STOP_SECONDS
            with progress.phase(f"End {found.job}"):
                silent = stop_job(launcher, JobPaths(found.job), grace, JobDisplay(progress).log)
            now = choose_job(list_jobs(head), found.job)
        result = {"cluster": args.name, "cancelled": ends, "unreachable": silent}
        results.append({**result, **(now.as_dict() if now else {"job": None})})
        if not args.json:
            print(_render(now, args.name, ctx.flags, ended=ends))
    if args.json:
        print(json.dumps({"jobs": results} if args.all else results[0]))
    return 0


def _render(found: JobSummary | None, cluster: str, flags: str, *, ended: bool) -> str:
    """Return in one or two lines what was done, and how the job continues."""
    if found is None:
        return f"No job is running or queued on cluster {cluster}."
    if not ended:
        return f"Job {found.job} has ended already: it is {found.state}."
    lines = [f"Job {found.job} has ended."]
    if found.unfinished and found.checkpoint:
        resume = f"{shlex.join(resume_command(task_of(found.job)))} {found.job} {flags}"
        lines.append(f"Checkpoint {found.checkpoint} is saved. To resume: {resume}")
    elif found.unfinished:
        lines.append("It had no checkpoint yet, so there is nothing to resume.")
    return "\n".join(lines)
