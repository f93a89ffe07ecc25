"""Options that several commands share: placement, queue, training, and trials."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cluster.console.output import emit
from cluster.console.parser import Parser, SubParsers, add_command, positive_int
from infra.errors import UsageError
from infra.s3_url import check_prefixes
from infra.words import parse_duration
from jobs.cli.shared.when_done import add_end_options, with_ends
from jobs.launchers.launcher import QUEUED
from jobs.launchers.plan import PLACEMENTS, PlacementOptions, new_job_id
from jobs.launchers.queue.job_output import how_to_come_back
from jobs.launchers.queue.session import DetachedError
from jobs.program.plan import check_variables, read_variables
from jobs.reference.plan import PRESETS
from jobs.train.request import expand_home
from jobs.train.trackers import find_hub_token
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import TrainOptions, flag

Run = Callable[[argparse.Namespace], int]
_HIDDEN = {"output", "trial_seconds", "resume"}
_SECONDS, _MAX_SECONDS = 20, 3600
# Options without effect in a trial.
_WITHOUT_EFFECT = _HIDDEN | {
    *("eval", "epochs", "max_steps", "checkpoint_every", "keep_checkpoints", "report_to"),
    *("learning_rate", "warmup_ratio"),
}
_FOR_EXPERTS = frozenset(
    {
        *("accumulate", "attention_dropout", "backend", "compile", "ipex", "keep_checkpoints"),
        *("stride", "token_cache", "warmup_ratio", "wire"),
    }
)
"""Training options whose defaults suit nearly every job; the usual help omits them."""


def add_placement_options(
    group: argparse._ArgumentGroup, ppn: str = "one per NUMA node", *, backend: bool = True
) -> None:
    """Add ``--nodes``, ``--ppn``, ``--placement``, ``--ccl-workers``, and ``--backend``.

    ``ppn`` describes the default of ``--ppn``.
    """
    add = group.add_argument
    add("--nodes", type=positive_int, metavar="N", help="number of nodes (default: all)")
    add("--ppn", type=positive_int, metavar="N", help=f"ranks per node (default: {ppn})")
    add(
        "--placement",
        choices=PLACEMENTS,
        default="auto",
        help="auto: each rank on its own cores; reference: the published recipe's numbers, which "
        "start more threads than there are cores (default: auto)",
    )
    add(
        "--ccl-workers",
        type=positive_int,
        metavar="N",
        help="cores per rank for oneCCL's workers instead of computing (default: 1)",
    )
    if backend:
        add(
            "--backend",
            choices=("auto", "ccl", "gloo"),
            default="auto",
            help="communication backend of the ranks; ccl reserves cores (default: the stack's)",
        )


def add_task_command(
    jobs: SubParsers, task: str, description: str, examples: str, run: Run
) -> Parser:
    """Return the parser of a task; ``{task}`` in the texts is its name."""
    about, more = (text.replace("{task}", task) for text in (description, examples))
    parser = add_command(jobs, task, about, more, TASKS[task].help, run)
    parser.set_defaults(task=task)
    return parser


def add_tasks(
    parser: Parser, description: str, examples: str, run: Run
) -> list[tuple[str, Parser]]:
    """Add a subcommand for each task; return the tasks with their parsers."""
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    return [(task, add_task_command(jobs, task, description, examples, run)) for task in TASKS]


def add_training_options(parser: Parser, task: str, *more_for_experts: str) -> None:
    """Add ``--demo`` and a task's training options.

    The usual help omits the task's advanced options and those in ``more_for_experts``.
    """
    parser.add_argument(
        "--demo", action="store_true", help="train a small new model on the bundled sample"
    )
    TASKS[task].Options.add_arguments(parser.add_argument_group("training"), without=_HIDDEN)
    parser.hide_from_help(_FOR_EXPERTS | {*more_for_experts})


def add_queue_options(group: argparse._ArgumentGroup, retries: int) -> None:
    """Add ``--retries`` with this default, ``--detach``, and options for the job's end."""
    group.add_argument(
        "--retries",
        type=int,
        choices=range(11),
        default=retries,
        metavar="N",
        help="run again up to N times after the loss of a rank or node; a training job resumes from "
        f"its last checkpoint (default: {retries})",
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="show the mpirun command (it is in job.json)"
    )
    group.add_argument(
        "--detach", action="store_true", help="return without following the job; see `attach`"
    )
    group.add_argument(
        "--bucket",
        type=bucket_url,
        metavar="URL",
        help="store the job's inputs, checkpoints, and results below this prefix in S3, as JOB; `none` "
        "stores nothing (default: that of `up --bucket`)",
    )
    group.add_argument(
        "--until-done",
        action="store_true",
        help="keep the nodes after the cluster's time to live until this job has ended, at most as long as "
        "the cluster's --max-hours and --max-cost allow",
    )
    add_end_options(group)


def add_max_time(group: argparse._ArgumentGroup) -> None:
    """Add ``--max-time``."""
    group.add_argument(
        "--max-time",
        type=max_time,
        metavar="DURATION",
        help="longest time from the job's first start, with its restarts, such as 90m, 8h, or 2d; then its "
        "ranks get SIGTERM and two minutes to save a checkpoint, and the job fails (default: no limit)",
    )


def max_time(text: str) -> timedelta:
    """Parse the value of ``--max-time``; a ``type`` for argparse."""
    try:
        found = parse_duration(text, "")
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message.strip()) from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected more than 0")
    return found


def bucket_url(text: str) -> str:
    """Parse ``s3://BUCKET/PREFIX``, or ``none``; a ``type`` for argparse."""
    try:
        return text if text == "none" else check_prefixes((text,), "")[0]
    except (UsageError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None


def add_variable_options(add: Callable[..., Any]) -> None:
    """Add ``--env`` and ``--env-file``, which :func:`read_variable_options` reads."""
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for the ranks; without a value, this machine's. It goes to the nodes in "
        "a private file, never into a command line, log, or record; repeatable",
    )
    add("--env-file", action="append", default=[], metavar="FILE", help="file of NAME=VALUE lines")
    add(
        "--hub-token",
        action="store_true",
        help="send this machine's Hugging Face login as HF_TOKEN, like --env, for private and gated models",
    )


def read_variable_options(args: argparse.Namespace) -> tuple[str, ...]:
    """Return ``NAME=VALUE`` words; those of ``--env`` come last, so they win."""
    read = [word for path in args.env_file for word in read_variables(expand_home(path))]
    token = [f"HF_TOKEN={find_hub_token()}"] if args.hub_token else []
    return check_variables([*token, *read, *args.env])


def detachable(run: Run) -> Run:
    """Wrap a command that follows a job; with ``--detach``, it prints how to reattach instead."""
    follow = with_ends(run)

    def run_or_leave(args: argparse.Namespace) -> int:
        try:
            return follow(args)
        except DetachedError as detached:
            job, text = detached.job, how_to_come_back(detached.job, detached.flags)
            emit(args, text, {"job": job, "state": QUEUED})
            return 0

    return run_or_leave


def read_placement(args: argparse.Namespace) -> PlacementOptions:
    """Return the values of :func:`add_placement_options`."""
    return PlacementOptions(args.placement, args.ppn, args.ccl_workers)


def read_options(args: argparse.Namespace, preset: str | None = None) -> TrainOptions:
    """Return the training options of a new job. Raises :class:`UsageError` for one out of range."""
    if args.demo and preset:
        raise UsageError("--demo and --preset can't be used together")
    if args.demo and getattr(args, "data", None):
        raise UsageError("--demo and --data can't be used together")
    task = TASKS[args.task]
    base: TrainOptions = task.demo if args.demo else task.Options()
    base = PRESETS[preset].as_options(base) if preset else base
    if args.demo and "dataset" in args:
        nothing: dict[str, Any] = {"data": None}
        base = replace(base, **nothing)
    for key in ("data", "eval"):
        if getattr(args, key, None):
            setattr(args, key, str(expand_home(getattr(args, key))))
    try:
        return base.changed_by(args)
    except ValueError as error:
        raise UsageError(str(error)) from None


def refuse_own_settings(args: argparse.Namespace, more: Iterable[str]) -> None:
    """Raise :class:`UsageError` for a training option, or one of ``more``, beside ``--recipe reference``."""
    refused = sorted({each.name for each in fields(TASKS["squad"].Options)} & vars(args).keys())
    refused += [name for name in more if getattr(args, name)]
    if refused:
        raise UsageError(
            f"{', '.join(map(flag, refused))}: --recipe reference is the published command, with its "
            "own settings",
            hint="use --preset and --nodes to choose among those, or --recipe fast with these options",
        )


def results_folder(args: argparse.Namespace, kind: str, now: datetime) -> Path:
    """Return the folder of ``--results``, by default ``results/JOB``."""
    return expand_home(args.results) if args.results else Path("results", new_job_id(kind, now))


def add_trial_options(
    parser: Parser, trials: argparse._ArgumentGroup, task: str, *without: str
) -> None:
    """Add ``--seconds`` and ``--demo`` to a group, and the training options that affect a trial."""
    text = f"seconds of measured training per trial (default: {_SECONDS})"
    trials.add_argument("--seconds", type=int, default=_SECONDS, help=text)
    trials.add_argument("--demo", action="store_true", help="try the job of `train TASK --demo`")
    add_variable_options(trials.add_argument)
    group = parser.add_argument_group("training")
    TASKS[task].Options.add_arguments(group, without=_WITHOUT_EFFECT | {*without})
    parser.hide_from_help(_FOR_EXPERTS)


def check_seconds(seconds: int) -> None:
    """Raise :class:`infra.errors.UsageError` if no trial can be that long."""
    if not 1 <= seconds <= _MAX_SECONDS:
        raise UsageError(f"--seconds {seconds} is out of range: 1 to {_MAX_SECONDS}")


def numbers(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4`` into distinct numbers; a ``type`` for argparse."""
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers such as 1,2,4")
    return tuple(dict.fromkeys(map(int, text.split(","))))
