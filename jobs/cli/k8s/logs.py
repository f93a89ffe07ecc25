"""``spr-cluster k8s logs``."""

from __future__ import annotations

import argparse
import sys

from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.k8s.access import access_flags, add_access_options, add_name_argument, open_api
from jobs.cli.k8s.follow import leaving_it
from jobs.cli.logs import show
from jobs.kubernetes.jobs import explain, follow_job, require_job
from jobs.kubernetes.pod_log import PodLog

_EXAMPLES = """\
  spr-cluster k8s logs squad-20261122-142501-k3f
  spr-cluster k8s logs -f squad-20261122-142501-k3f
  spr-cluster k8s logs squad-20261122-142501-k3f --rank 3
"""


def add_parser(actions: SubParsers) -> None:
    parser = add_command(
        actions,
        "logs",
        "Print the log of a job's first pod, with the events that its ranks report as text. A connection "
        "that breaks off is made again, and each line is printed once.",
        _EXAMPLES,
        help_="print a job's log",
    )
    add_name_argument(parser)
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on until the job ends; Ctrl-C ends only this",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="R",
        help="of the pod in which this rank runs, from 0",
    )
    add_access_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    api = open_api(args)
    found = require_job(api, args.job)
    ranks = found.job.nodes * found.job.node_ranks
    if not 0 <= args.rank < ranks:
        raise UsageError(f"--rank {args.rank}: job {args.job} has {counted(ranks, 'rank')}, from 0")
    if args.follow:
        with leaving_it(args.job, args):
            follow_job(
                api, args.job, show, lambda trouble: print(trouble, file=sys.stderr), args.rank
            )
        return 0
    pod = found.pod(args.rank)
    if pod is None or pod.phase == "Pending":
        reasons = explain(api, found)
        raise UsageError(
            f"job {args.job} has no log yet" + (f": {reasons[0].text}" if reasons else ""),
            hint=f"spr-cluster k8s status {args.job}{access_flags(args)}",
        )
    PodLog(api, pod, show).read(follow=False)
    return 0
