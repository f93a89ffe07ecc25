"""``spr-cluster k8s logs``."""

from __future__ import annotations

import argparse
import sys

from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.k8s.common import access_flags, add_job_options, open_api
from jobs.cli.k8s.follow import leaving_it
from jobs.cli.logs import LogPrinter
from jobs.launchers.kubernetes.jobs import explain, follow_job, require_job
from jobs.launchers.kubernetes.pod_log import read_log

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
    add_job_options(parser, json=False)
    add = parser.add_argument
    text = "go on until the job ends; Ctrl-C ends only this"
    add("-f", "--follow", action="store_true", help=text)
    text = "of the pod in which this rank runs, from 0"
    add("--rank", type=int, default=0, metavar="R", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    api = open_api(args)
    job = require_job(api, args.job)
    ranks = job.nodes * job.node_ranks
    if not 0 <= args.rank < ranks:
        raise UsageError(f"--rank {args.rank}: job {args.job} has {counted(ranks, 'rank')}, from 0")
    show = LogPrinter(args.job).take
    if args.follow:
        with leaving_it(args.job, args):
            follow_job(api, args.job, show, _warn, args.rank)
        return 0
    pod = job.pod(args.rank)
    if pod is None or pod.phase == "Pending":
        reasons = explain(api, job)
        raise UsageError(
            f"job {args.job} has no log yet" + (f": {reasons[0].text}" if reasons else ""),
            hint=f"spr-cluster k8s status {args.job}{access_flags(args)}",
        )
    read_log(api, pod, show, _warn)
    return 0


def _warn(text: object) -> None:
    print(text, file=sys.stderr)
