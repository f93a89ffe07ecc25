"""``spr-cluster cancel``."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace

from cluster.console.display import make_progress
from cluster.console.output import confirm, emit
from cluster.console.parser import SubParsers, add_command, add_yes_option
from infra.errors import UsageError
from jobs.cli.chosen_job import add_job_options, open_launcher
from jobs.cli.job_display import JobDisplay
from jobs.launchers.kubernetes.launcher import KubernetesLauncher
from jobs.launchers.launcher import DELETED, RUNNING, JobSummary, Launcher, choose_several
from jobs.train.train import resume_command, task_of

_EXAMPLES = """\
  spr-cluster cancel
  spr-cluster cancel --now                       do not wait for a checkpoint
  spr-cluster cancel --all
  spr-cluster cancel squad-20260731-142501-k3f --name bert
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "cancel",
        "End a job on all nodes, or remove it from the queue. A training job saves a checkpoint first.\n"
        "What is left after two minutes (other jobs: ten seconds), or after Ctrl-C, is killed, even if\n"
        "nodes are gone. If there is no job, nothing happens. On Kubernetes, the job is deleted; its files\n"
        "stay on the claim, so a job with the same name and options resumes from its newest checkpoint.",
        _EXAMPLES,
        run=run,
    )
    add_job_options(parser)
    parser.add_argument("--all", action="store_true", help="end all jobs that run or wait")
    parser.add_argument("--now", action="store_true", help="kill it without waiting")
    text = "on Kubernetes: also delete its claim, with the files of all jobs on it, unless others use it"
    parser.add_argument("--delete-claim", action="store_true", help=text)
    add_yes_option(parser, "delete the claim without asking")


def run(args: argparse.Namespace) -> int:
    progress = make_progress()
    launcher = open_launcher(args, progress)
    chosen = choose_several(launcher.list_jobs(), args.job, launcher.place, every=args.all)
    if chosen and not args.job and isinstance(launcher, KubernetesLauncher):
        raise UsageError(
            f"name the job to end: others may use the namespace, where {chosen[0].job} is active",
            hint="`spr-cluster jobs` lists them",
        )
    claim = _choose_claim(launcher, chosen, args) if args.delete_claim else ""
    results = []
    # Those that wait first: they would start on the nodes of the others.
    ordered = sorted(chosen, key=lambda job: job.state == RUNNING)
    for found in (*ordered,) or (None,):
        now, silent = found, tuple[str, ...]()
        ends = found is not None and launcher.can_cancel(found)
        if found and ends:
            with progress.phase(f"End {found.job}"):
                silent = launcher.cancel(found, JobDisplay(progress).log, now=args.now)
            left = [job for job in launcher.list_jobs() if job.job == found.job]
            now = left[0] if left else replace(found, state=DELETED)
        result = {**launcher.where, "cancelled": ends, "unreachable": silent}
        results.append({**result, **(now.as_dict() if now else {"job": None})})
        if not args.json:
            print(_render(now, launcher, ended=ends))
    if claim and isinstance(launcher, KubernetesLauncher):
        with progress.phase(f"Delete claim {claim}"):
            launcher.delete_claim(claim, progress.note)
        results[0]["claim"] = claim
        if not args.json:
            print(f"Claim {claim} is gone.")
    emit(args, "", {"jobs": results} if args.all else results[0])
    return 0


def _choose_claim(launcher: Launcher, chosen: list[JobSummary], args: argparse.Namespace) -> str:
    """Return the claim of the job, once its loss is approved. Raises :class:`UsageError`."""
    if not isinstance(launcher, KubernetesLauncher) or args.all or not chosen:
        raise UsageError("--delete-claim is for one job on Kubernetes")
    claim = launcher.choose_claim(chosen[0])
    question = f"Delete job {chosen[0].job} and claim {claim} with all of its files?"
    confirm(question, yes=args.yes)
    return claim


def _render(found: JobSummary | None, launcher: Launcher, *, ended: bool) -> str:
    """Return in one or two lines what was done, and how the job continues."""
    if found is None:
        return f"No job is running or queued {launcher.place}."
    if not ended:
        return f"Job {found.job} has ended already: it is {found.state}."
    if found.state == DELETED:
        return f"Job {found.job} is gone."
    lines = [f"Job {found.job} has ended."]
    if found.unfinished and found.checkpoint:
        resume = f"{shlex.join(resume_command(task_of(found.job)))} {found.job} {launcher.flags}"
        lines.append(f"Checkpoint {found.checkpoint} is saved. To resume: {resume}")
    elif found.unfinished:
        lines.append("It had no checkpoint yet, so there is nothing to resume.")
    return "\n".join(lines)
