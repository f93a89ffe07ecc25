"""``spr-cluster train``: one subcommand per task; squad also offers the published recipe."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.cli.chosen_cluster import add_cluster_options
from cluster.console.output import emit, say
from cluster.console.parser import SubParsers, add_command, positive_int
from infra.errors import UsageError
from jobs.cli.places import kubernetes, slurm
from jobs.cli.places.dry_run import Target, run_dry
from jobs.cli.places.options import (
    CLUSTER,
    HIDDEN,
    KUBERNETES,
    add_place_options,
    check_place,
)
from jobs.cli.results.fetch import add_push_option, open_push_target, push
from jobs.cli.shared.chosen_job import add_results_option, open_job_context
from jobs.cli.shared.job_display import render_result
from jobs.cli.shared.job_options import (
    add_max_time,
    add_placement_options,
    add_queue_options,
    add_task_command,
    add_training_options,
    add_variable_options,
    detachable,
    read_options,
    read_placement,
    read_variable_options,
    refuse_own_settings,
    results_folder,
)
from jobs.launchers.plan import JobPlan
from jobs.launchers.queue.session import JobContext
from jobs.launchers.record import read_job_id
from jobs.reference.plan import (
    PRESETS,
    ReferenceRequest,
    check_script,
    plan_reference,
    train_reference,
)
from jobs.train.request import (
    TrainRequest,
    check_inputs,
    check_results,
    check_writable,
    expand_home,
    require_able_stack,
)
from jobs.train.resume import ResumeRequest, parse_stored_job, resume
from jobs.train.trackers import tracker_variables
from jobs.train.train import plan_training, train
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import MAY_CHANGE, flag
from provision.stacks.compatibility import runs_tasks
from provision.stacks.stack import Stack

_EXAMPLES = """\
  spr-cluster train squad                  DistilBERT on SQuAD
  spr-cluster train classify --data texts.csv --eval-fraction 0.1
  spr-cluster train classify --model org/m --data texts.csv --hub-token
  spr-cluster train tag --data train.conll --eval dev.conll
  spr-cluster train embed --data pairs.jsonl --eval-fraction 0.1
  spr-cluster train lm --data texts.txt --eval-fraction 0.1 --lora
  spr-cluster train classify --data s3://my-data/train.parquet
  spr-cluster train digits                 does this cluster train? no data
  spr-cluster train squad --dry-run --instance-type r7iz.metal-16xl
  spr-cluster train squad --to kubernetes-yaml --nodes 4 --output build
  spr-cluster train squad --to slurm-script --nodes 4 --cores 64
"""
_TASK_EXAMPLES = """\
  spr-cluster train {task} --data train.csv --eval-fraction 0.2
  spr-cluster train {task} --data train.jsonl --eval dev.jsonl --seed 7
  spr-cluster train {task} --demo        small model, small sample
  spr-cluster train {task} --resume      the last unfinished job
  spr-cluster train {task} --resume s3://mine/{task}-20260731-142501-k3f
  spr-cluster train {task} --to slurm-script --nodes 2 --cores 8 --demo
"""
_SQUAD_EXAMPLES = """\
  spr-cluster train squad               DistilBERT on SQuAD
  spr-cluster train squad --data train.json --eval dev.json --model ./mine
  spr-cluster train squad --demo        small model, small sample
  spr-cluster train squad --resume      the last unfinished job
  spr-cluster train squad --resume s3://mine/squad-20260731-142501-k3f
  spr-cluster train squad --recipe reference --smoke
  spr-cluster train squad --to slurm-script --nodes 2 --cores 8 --demo
  spr-cluster train squad --to kubernetes-yaml --nodes 4 --image me/spr:1
"""
_RECIPES = ("fast", "reference")
Request = TrainRequest | ReferenceRequest | ResumeRequest
_SQUAD = (
    "Fine-tune a question answering model with PyTorch DDP on all nodes, evaluate it with\n"
    "SQuAD's exact match and F1, and fetch the model and results."
)
RETRIES = 1
LAST = "the last unfinished one"
# Options that may change on resume, besides those that do not affect what is learned.
_RESUME_MAY_CHANGE = MAY_CHANGE | {"checkpoint_every", "keep_checkpoints", "report_to"}
_DEFAULTS = {"placement": "auto", "recipe": "fast"}


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        "Train with PyTorch DDP on all nodes of a cluster, and fetch the results.",
        _EXAMPLES,
    )
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for task in TASKS:
        _add_task(jobs, task)


def _add_task(jobs: SubParsers, task: str) -> None:
    is_squad = task == "squad"
    about = (
        f"Train a model with PyTorch DDP on all nodes: {TASKS[task].help}. Evaluate it, and fetch\n"
    )
    about = _SQUAD if is_squad else about + "the model and results."
    examples = _SQUAD_EXAMPLES if is_squad else _TASK_EXAMPLES
    if not hasattr(TASKS[task].Options, "data"):
        lines = examples.splitlines(keepends=True)
        examples = "".join(line for line in lines if "--data" not in line)
    parser = add_task_command(jobs, task, about, examples, detachable(run))
    add_cluster_options(parser)
    add_place_options(parser)
    parser.set_defaults(recipe="fast", preset=None, smoke=False, run_qa=None)
    if is_squad:
        _add_recipe(parser.add_argument_group("recipe"))
    placement = parser.add_argument_group("placement")
    add_placement_options(placement, "the result of `tune`, else one per NUMA node", backend=False)
    queue = parser.add_argument_group("queue")
    add_queue_options(queue, retries=RETRIES)
    add_max_time(queue)
    # So that the published recipe, which has none of them, can reject them.
    queue.set_defaults(retries=None)
    queue.add_argument(
        "--elastic",
        type=positive_int,
        metavar="MIN",
        help="after the loss of a node, continue with at least MIN nodes and the same features per step, "
        "instead of waiting for `repair`",
    )
    placement.add_argument(
        "--no-tuned", action="store_true", help="ignore the result of `spr-cluster tune`"
    )
    add_variable_options(parser.add_argument)
    add_results_option(parser, "the results")
    add_push_option(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=LAST,
        default=argparse.SUPPRESS,
        metavar="JOB",
        help="continue an interrupted job from its last checkpoint, with its own options; also one of "
        "another cluster, by its URL in that cluster's bucket (default: the last unfinished one)",
    )
    add_training_options(parser, task, "run_qa", "placement", "ccl_workers", "no_tuned", *HIDDEN)


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
        help="recipe reference: run for a minute on one node, to check that nothing is missing",
    )
    group.add_argument(
        "--run-qa",
        metavar="DIR",
        help="recipe reference: local folder with run_qa.py (default: the stack's, on the nodes)",
    )


def run(args: argparse.Namespace) -> int:
    now = datetime.now(timezone.utc)
    check_place(vars(args))
    if args.to != CLUSTER or args.dry_run:
        emit(args, *_write_elsewhere(args, now))
        return 0
    request = _build_request(args, now)
    target = open_push_target(args)
    context = open_job_context(args, now, show_cost=True)
    request = follow_stack(args, request, context.stack, now)
    result, folder = _train(context, request)
    if not args.json:
        print(render_result(result, folder), flush=True)
    pushed = push(target, folder, read_job_id(folder), context.progress, context.cluster.flags)
    emit(args, pushed or "", {**result, "pushed_to": pushed} if pushed else result)
    return 0


def _write_elsewhere(args: argparse.Namespace, now: datetime) -> tuple[str, dict[str, object]]:
    """Return the job as it is printed, after writing or creating it if the user asked for that."""
    if args.to == CLUSTER:
        request = _build_request(args, now)
        if isinstance(request, ResumeRequest):
            raise UsageError("--dry-run: a resumed job's options are on its nodes: omit --resume")
        return run_dry(args, now, lambda target: _plan_dry(args, request, target, now))
    if args.to == KUBERNETES:
        pods = kubernetes.read_job(args, now)
        for warning in pods.placement.warnings:
            say(f"warning: {warning}")
        if args.apply:
            return kubernetes.apply(pods, yes=args.yes, dry_run=args.dry_run)
        if args.dry_run:
            return kubernetes.summarize(pods), kubernetes.describe(pods)
        return kubernetes.write(pods, args.write_to)
    script = slurm.read_job(args, now)
    if args.dry_run:
        return slurm.summarize(script), slurm.describe(script)
    return slurm.write(script, args.write_to)


def _plan_dry(args: argparse.Namespace, request: Request, target: Target, now: datetime) -> JobPlan:
    found = follow_stack(args, request, target.stack, now)
    if isinstance(found, ReferenceRequest):
        nodes = len(target.cluster.first(found.nodes).nodes)
        return plan_reference(found, target.stack, nodes)
    assert isinstance(found, TrainRequest)
    require_able_stack(target.stack, f"train {found.options.task}")
    return plan_training(found, target.stack)


def _build_request(args: argparse.Namespace, now: datetime) -> Request:
    """Return the request, checked as far as possible locally. Raises :class:`UsageError`."""
    if "resume" in args:
        return build_resume(args)
    if args.recipe == "reference":
        request: TrainRequest | ReferenceRequest = build_reference(args, now)
    else:
        request = build_request(args, now)
        check_inputs(request.options)
    check_results(request.results)
    return request


def follow_stack(
    args: argparse.Namespace, request: Request, stack: Stack, now: datetime
) -> Request:
    """Return the published recipe's request if `train squad`, without options, can't run otherwise."""
    if not isinstance(request, TrainRequest) or runs_tasks(stack) or not stack.examples:
        return request
    if args.task != "squad":
        return request
    try:
        found = build_reference(args, now)
    except UsageError:  # Its options are not the recipe's: refused with stacks that have them.
        return request
    say(f"stack {stack.name} runs only the published recipe: this is `--recipe reference`")
    return found


def _train(context: JobContext, request: Request) -> tuple[dict[str, Any], Path]:
    """Start or resume the job; return its results and their folder."""
    if isinstance(request, ResumeRequest):
        return resume(context, request)
    if isinstance(request, ReferenceRequest):
        return train_reference(context, request), request.results
    return train(context, request), request.results


def build_resume(args: argparse.Namespace) -> ResumeRequest:
    """Return the request to resume a job. Raises :class:`UsageError` if an option would change the job."""
    Options = TASKS[args.task].Options  # noqa: N806
    given = {each.name for each in fields(Options)} & vars(args).keys() - {"resume"}
    fixed = ("demo", "ccl_workers", "nodes", "elastic", "preset", "smoke", "run_qa")
    refused = given - _RESUME_MAY_CHANGE | {name for name in fixed if getattr(args, name)}
    refused |= {name for name, default in _DEFAULTS.items() if getattr(args, name) != default}
    if refused:
        raise UsageError(
            f"{', '.join(sorted(map(flag, refused)))}: a resumed job keeps its own",
            hint="omit it, or start a new job without --resume",
        )
    changes = {name: getattr(args, name) for name in given}
    try:
        replace(Options(), **changes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    job, bucket = None if args.resume == LAST else args.resume, None
    if job and "://" in job:
        bucket, job = parse_stored_job(job, "--resume")
        if not job.startswith(f"{args.task}-"):
            raise UsageError(f"job {job} is not one of `train {args.task}`")
    results = expand_home(args.results) if args.results else None
    if results:
        check_writable(results)
    variables = read_variable_options(args)
    return ResumeRequest(
        args.task, job, results, changes, args.ppn, _retries(args), variables, bucket
    )


def build_request(args: argparse.Namespace, now: datetime) -> TrainRequest:
    """Return the request of a new job. Raises :class:`UsageError` for an option out of range."""
    for name, given in {"--smoke": args.smoke, "--run-qa": args.run_qa}.items():
        if given:
            raise UsageError(f"{name} requires --recipe reference")
    options = read_options(args, args.preset)
    results = results_folder(args, args.task, now)
    return TrainRequest(
        options,
        results,
        read_placement(args),
        left_open(args),
        args.nodes,
        _retries(args),
        args.elastic,
        tracker_variables(options.report_to, read_variable_options(args)),
        hub_token=args.hub_token,
    )


def build_reference(args: argparse.Namespace, now: datetime) -> ReferenceRequest:
    """Return the published recipe's request. Raises :class:`UsageError` for options that it fixes."""
    names = (
        "ppn",
        "ccl_workers",
        "demo",
        "no_tuned",
        "elastic",
        "retries",
        "env",
        "env_file",
        "hub_token",
    )
    refuse_own_settings(args, names)
    if args.smoke and args.nodes not in (None, 1):
        raise UsageError("--smoke runs on one node: omit --nodes")
    if args.smoke and args.push_to:
        raise UsageError("--smoke trains no model: omit --push-to")
    return ReferenceRequest(
        preset=PRESETS[args.preset or "distilbert"],
        results=results_folder(args, "squad", now),
        nodes=args.nodes,
        script=check_script(expand_home(args.run_qa)) if args.run_qa else None,
        smoke=args.smoke,
    )


def _retries(args: argparse.Namespace) -> int:
    return RETRIES if args.retries is None else int(args.retries)


def left_open(args: argparse.Namespace) -> frozenset[str]:
    """Return the options that the user left to `tune`."""
    if args.no_tuned or args.placement != "auto":
        return frozenset()
    chosen = "batch_size" in args or getattr(args, "preset", None)
    batch_size = set() if chosen else {"batch_size"}
    placement = set() if args.ppn or args.ccl_workers else {"placement"}
    return frozenset(batch_size | placement)
