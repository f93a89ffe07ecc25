"""``spr-cluster train``: one subcommand for each type of job."""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone

from cluster.cli.common import add_cluster_options
from cluster.cli.parser import SubParsers, add_command
from jobs.cli import train_task
from jobs.cli.context import open_job_context
from jobs.cli.job_options import (
    add_placement_options,
    add_queue_options,
    detachable,
    read_placement,
    results_folder,
)
from jobs.launchers.queue.session import run_job
from jobs.train.job_types import JOB_TYPES, JobTypeRequest, add_job_arguments, plan_job_type
from jobs.train.request import check_results, require_able_stack
from jobs.worker.tasks import TASKS

_EXAMPLES = """\
  spr-cluster train squad                     DistilBERT on SQuAD
  spr-cluster train classify --data texts.csv --eval-fraction 0.1
  spr-cluster train tag --data train.conll --eval dev.conll
  spr-cluster train digits --epochs 3         does this cluster train? no data, seconds
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        "Train with PyTorch DDP on all nodes of a cluster, and fetch the results.",
        _EXAMPLES,
    )
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for task in TASKS:
        train_task.add_parser(jobs, task)
    for name, help_ in JOB_TYPES.items():
        _add_job_type(jobs, name, help_)


def _add_job_type(jobs: SubParsers, name: str, help_: str) -> None:
    examples = f"  spr-cluster train {name}\n  spr-cluster train {name} --nodes 2 --ppn 2\n"
    parser = add_command(jobs, name, f"Train {help_}.", examples, help_=help_)
    add_cluster_options(parser)
    add_placement_options(parser.add_argument_group("placement"))
    add_queue_options(parser.add_argument_group("queue"), retries=0)
    parser.add_argument("--results", metavar="DIR", help="local folder (default: results/JOB)")
    group = parser.add_argument_group("job")
    add_job_arguments(name, group)
    own = [action.dest for action in group._group_actions]
    parser.set_defaults(run=detachable(lambda args: run(name, own, args)))


def run(name: str, own: list[str], args: argparse.Namespace) -> int:
    now = datetime.now(timezone.utc)
    request = JobTypeRequest(
        name,
        {option: getattr(args, option) for option in own},
        results_folder(args, name, now),
        read_placement(args),
        args.nodes,
        args.backend,
        args.retries,
    )
    check_results(request.results)
    context = open_job_context(args, now, show_cost=True)
    require_able_stack(context.stack, f"train {name}")
    plan = plan_job_type(request, context.stack)
    done = run_job(context, lambda _: plan)
    result = {**(done.last_event("result") or {})}
    result.pop("at", None)
    if args.json:
        print(json.dumps(result))
    else:
        figures = {key: value for key, value in result.items() if isinstance(value, int | float)}
        print("\n".join(f"{key:20} {value:g}" for key, value in figures.items()))
        print(f"results.json, log, and metrics: {request.results}/")
    return 0
