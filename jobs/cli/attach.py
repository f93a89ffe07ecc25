"""``spr-cluster attach``."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.files import read_object
from jobs.cli.chosen_job import add_job_options
from jobs.cli.context import open_job_context
from jobs.cli.job_display import render_end
from jobs.cli.k8s.access import find_access, open_kubernetes
from jobs.cli.k8s.follow import follow
from jobs.cli.when_done import add_end_options, with_ends
from jobs.launchers.job_state import JobEnd
from jobs.launchers.launcher import JobSummary, choose_active
from jobs.launchers.queue.history import list_jobs
from jobs.launchers.queue.session import attach
from jobs.launchers.record import claim_results
from jobs.train.request import check_results, expand_home

_EXAMPLES = """\
  spr-cluster attach
  spr-cluster attach squad-20260731-142501-k3f --name bert
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "attach",
        "Follow a job from the beginning of its log, from any machine that has the cluster's key, and\n"
        "fetch its results when it ends. Ctrl-C ends only this command.",
        _EXAMPLES,
    )
    add_job_options(parser)
    parser.add_argument(
        "--results", metavar="DIR", help="local folder for the files (default: results/JOB)"
    )
    add_end_options(parser.add_argument_group("at the end"))
    parser.set_defaults(run=with_ends(run))


def run(args: argparse.Namespace) -> int:
    access = find_access(args)
    if access is not None:
        if args.on_finish is not None or args.down_when_done:
            raise UsageError(
                "--on-finish and --down-when-done are for jobs on a cluster of this tool"
            )
        progress, launcher = make_progress(), open_kubernetes(access, args)
        found = _require(
            choose_active(launcher.list_jobs(), args.job, launcher.place), launcher.place
        )
        results = _choose_results(args, found.job)
        end: JobEnd = follow(launcher, found.job, progress)[0]
        with progress.phase("Fetch the results"):
            for line in launcher.fetch(found.job, results, progress.note):
                print(line, file=sys.stderr)
    else:
        context = open_job_context(args, datetime.now(timezone.utc), show_cost=True)
        listed = list_jobs(context.open_host(context.cluster.head))
        found = _require(choose_active(listed, args.job), f"on cluster {context.cluster.name}")
        results = _choose_results(args, found.job)
        claim_results(results, found.job)
        end = attach(context, found.job, results)
    if args.json:
        print(json.dumps({"job": found.job, **end.as_dict(), "results": str(results)}))
    else:
        file = results / "results.json"
        print(render_end(found.job, end, read_object(file) if file.is_file() else {}, results))
    return 0


def _require(found: JobSummary | None, place: str) -> JobSummary:
    if found is None:
        raise UsageError(
            f"no job is running or queued {place}",
            hint="`spr-cluster jobs` lists the earlier ones, `spr-cluster fetch JOB` downloads one",
        )
    return found


def _choose_results(args: argparse.Namespace, job: str) -> Path:
    results = expand_home(args.results) if args.results else Path("results", job)
    check_results(results, job)
    return results
