"""Options that several job commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path

from cluster.cli.parser import SubParsers, add_command, positive_int
from jobs.cli.when_done import add_end_options, with_ends
from jobs.launchers.job_state import QUEUED
from jobs.launchers.node_shape import NodeShape
from jobs.launchers.plan import PLACEMENTS, PlacementOptions, new_job_id
from jobs.launchers.queue.job_output import how_to_come_back
from jobs.launchers.queue.session import DetachedError
from jobs.train.request import expand_home
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import flag

_HIDDEN = {"output", "trial_seconds", "resume"}


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


def add_shape_options(group: argparse._ArgumentGroup, texts: Mapping[str, str]) -> None:
    """Add the options that make a :class:`NodeShape`: those of its fields that ``texts`` describe."""
    add = group.add_argument
    for name, text in texts.items():
        default = getattr(NodeShape(), name)
        option, help_ = flag(name.removesuffix("_gib")), f"{text} (default: {default})"
        add(option, dest=name, type=positive_int, default=default, metavar="N", help=help_)


def read_shape(args: argparse.Namespace) -> NodeShape:
    """Return the value of :func:`add_shape_options`. Raises :class:`UsageError` for one out of range."""
    names = {each.name for each in fields(NodeShape)}
    return NodeShape(**{name: value for name, value in vars(args).items() if name in names})


def add_task_command(
    jobs: SubParsers, task: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Return the parser of a task; ``{task}`` in the texts is its name."""
    about, more = (text.replace("{task}", task) for text in (description, examples))
    parser = add_command(jobs, task, about, more, help_=TASKS[task].help)
    parser.set_defaults(task=task)
    return parser


def add_training_options(parser: argparse.ArgumentParser, task: str) -> None:
    """Add ``--demo``, and what a task can be asked for."""
    parser.add_argument(
        "--demo", action="store_true", help="train a small new model on the bundled sample"
    )
    TASKS[task].Options.add_arguments(parser.add_argument_group("training"), without=_HIDDEN)


def add_queue_options(group: argparse._ArgumentGroup, retries: int) -> None:
    """Add ``--retries``, with this default, ``--detach``, and what happens at the job's end."""
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
        "--detach", action="store_true", help="do not follow the job; `spr-cluster attach` does"
    )
    add_end_options(group)


def detachable(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that runs a job to its end, or after ``--detach`` says how to come back to it."""
    follow = with_ends(run)

    def run_or_leave(args: argparse.Namespace) -> int:
        try:
            return follow(args)
        except DetachedError as detached:
            job, text = detached.job, how_to_come_back(detached.job, detached.flags)
            print(json.dumps({"job": job, "state": QUEUED}) if args.json else text)
            return 0

    return run_or_leave


def read_placement(args: argparse.Namespace) -> PlacementOptions:
    """Return the values of :func:`add_placement_options`."""
    return PlacementOptions(args.placement, args.ppn, args.ccl_workers)


def results_folder(args: argparse.Namespace, kind: str, now: datetime) -> Path:
    """Return the folder of ``--results``, by default ``results/JOB``."""
    return expand_home(args.results) if args.results else Path("results", new_job_id(kind, now))
