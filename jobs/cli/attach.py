"""``spr-cluster attach``."""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.common import add_cluster_options
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.files import read_object
from jobs.cli.chosen_job import add_job_argument
from jobs.cli.context import open_job_context
from jobs.cli.job_display import render_end
from jobs.cli.when_done import add_end_options, with_ends
from jobs.launchers.queue.history import choose_active, list_jobs
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
    add_job_argument(parser)
    parser.add_argument(
        "--results", metavar="DIR", help="local folder for the files (default: results/JOB)"
    )
    add_end_options(parser.add_argument_group("at the end"))
    add_cluster_options(parser)
    parser.set_defaults(run=with_ends(run))


def run(args: argparse.Namespace) -> int:
    context = open_job_context(args, datetime.now(timezone.utc), show_cost=True)
    found = choose_active(list_jobs(context.open_host(context.cluster.head)), args.job)
    if found is None:
        raise UsageError(
            f"no job is running or queued on cluster {context.cluster.name}",
            hint="`spr-cluster jobs` lists the earlier ones, `spr-cluster fetch JOB` downloads one",
        )
    results = expand_home(args.results) if args.results else Path("results", found.job)
    check_results(results, found.job)
    claim_results(results, found.job)
    end = attach(context, found.job, results)
    if args.json:
        print(json.dumps({"job": found.job, **end.as_dict(), "results": str(results)}))
    else:
        file = results / "results.json"
        print(render_end(found.job, end, read_object(file) if file.is_file() else {}, results))
    return 0
