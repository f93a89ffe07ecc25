"""``spr-cluster train TASK``: any task of the engine; for squad, the published recipe, too."""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.cli.common import add_cluster_options
from cluster.cli.parser import SubParsers, positive_int
from jobs.cli.context import open_job_context
from jobs.cli.fetch import add_push_option, open_push_target, push
from jobs.cli.job_display import render_result
from jobs.cli.job_options import (
    add_placement_options,
    add_queue_options,
    add_task_command,
    add_training_options,
    detachable,
)
from jobs.cli.train_requests import LAST, RETRIES, build_reference, build_request, build_resume
from jobs.launchers.queue.session import JobContext
from jobs.launchers.record import read_job_id
from jobs.reference.plan import ReferenceRequest, train_reference
from jobs.reference.presets import PRESETS
from jobs.train.request import TrainRequest, check_inputs, check_results
from jobs.train.resume import ResumeRequest, resume
from jobs.train.train import train
from jobs.worker.tasks import TASKS

_EXAMPLES = """\
  spr-cluster train {task} --data train.csv --eval-fraction 0.2
  spr-cluster train {task} --data train.jsonl --eval dev.jsonl --model ./my-encoder
  spr-cluster train {task} --demo                      small model, small sample
  spr-cluster train {task} --resume                    the last unfinished job
"""
_SQUAD_EXAMPLES = """\
  spr-cluster train squad                             DistilBERT on SQuAD
  spr-cluster train squad --data train.json --eval dev.json --model ./my-encoder
  spr-cluster train squad --demo                      small model, small sample
  spr-cluster train squad --resume                    the last unfinished job
  spr-cluster train squad --recipe reference --smoke  try the published recipe
"""
_RECIPES = ("fast", "reference")
Request = TrainRequest | ReferenceRequest | ResumeRequest


_SQUAD = (
    "Fine-tune a question answering model with PyTorch DDP on all nodes, evaluate it with\n"
    "SQuAD's exact match and F1, and fetch the model and results."
)


def add_parser(jobs: SubParsers, task: str) -> None:
    is_squad = task == "squad"
    about = (
        f"Train a model with PyTorch DDP on all nodes: {TASKS[task].help}. Evaluate it, and fetch\n"
    )
    about = _SQUAD if is_squad else about + "the model and results."
    examples = _SQUAD_EXAMPLES if is_squad else _EXAMPLES
    if not hasattr(TASKS[task].Options, "data"):
        lines = examples.splitlines(keepends=True)
        examples = "".join(line for line in lines if "--data" not in line)
    parser = add_task_command(jobs, task, about, examples)
    add_cluster_options(parser)
    parser.set_defaults(recipe="fast", preset=None, smoke=False, run_qa=None)
    if is_squad:
        _add_recipe(parser.add_argument_group("recipe"))
    placement = parser.add_argument_group("placement")
    add_placement_options(placement, "the result of `tune`, else one per NUMA node", backend=False)
    queue = parser.add_argument_group("queue")
    add_queue_options(queue, retries=RETRIES)
    # So that the published recipe, which has none, can refuse them.
    queue.set_defaults(retries=None)
    queue.add_argument(
        "--elastic",
        type=positive_int,
        metavar="MIN",
        help="after the loss of a node, go on with at least MIN nodes and the same features per step, "
        "instead of waiting for `repair`",
    )
    placement.add_argument(
        "--no-tuned", action="store_true", help="ignore the result of `spr-cluster tune`"
    )
    parser.add_argument(
        "--results", metavar="DIR", help="local folder for the results (default: results/JOB)"
    )
    add_push_option(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=LAST,
        default=argparse.SUPPRESS,
        metavar="JOB",
        help="continue an interrupted job from its last checkpoint, with its own options "
        "(default: the last unfinished one)",
    )
    add_training_options(parser, task)
    parser.set_defaults(run=detachable(run))


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recipe",
        choices=_RECIPES,
        default="fast",
        help="fast: this tool's own; reference: transformers' run_qa.py with the published flags "
        "and placement, and no other options (default: fast)",
    )
    group.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        help="published model, batch size, learning rate, and epochs (default with --recipe "
        "reference: distilbert)",
    )
    group.add_argument(
        "--smoke",
        action="store_true",
        help="recipe reference: run a minute on one node, to check that everything is there",
    )
    group.add_argument(
        "--run-qa",
        metavar="DIR",
        help="recipe reference: local folder with run_qa.py (default: the stack's, on the nodes)",
    )


def run(args: argparse.Namespace) -> int:
    now = datetime.now(timezone.utc)
    request = _build_request(args, now)
    target = open_push_target(args)
    context = open_job_context(args, now, show_cost=True)
    result, folder = _train(context, request)
    if not args.json:
        print(render_result(result, folder), flush=True)
    pushed = push(target, folder, read_job_id(folder), context.progress, context.cluster.flags)
    if args.json:
        print(json.dumps({**result, "pushed_to": pushed} if pushed else result))
    elif pushed:
        print(pushed)
    return 0


def _build_request(args: argparse.Namespace, now: datetime) -> Request:
    """Return what to do, checked as far as possible on this machine. Raises :class:`UsageError`."""
    if "resume" in args:
        return build_resume(args)
    if args.recipe == "reference":
        request: TrainRequest | ReferenceRequest = build_reference(args, now)
    else:
        request = build_request(args, now)
        check_inputs(request.options)
    check_results(request.results)
    return request


def _train(context: JobContext, request: Request) -> tuple[dict[str, Any], Path]:
    """Start or resume the job; return its results and their folder."""
    if isinstance(request, ResumeRequest):
        return resume(context, request)
    if isinstance(request, ReferenceRequest):
        return train_reference(context, request), request.results
    return train(context, request), request.results
