"""``spr-cluster tune``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.cli.common import add_cluster_options
from cluster.cli.display import format_seconds, format_table
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from jobs.cli.context import open_job_context
from jobs.cli.train_requests import read_options
from jobs.cli.trial_options import (
    add_training_arguments,
    add_trial_arguments,
    check_seconds,
    numbers,
)
from jobs.experiments.trial_grid import Outcome, TrialGrid, as_row, estimate_minutes
from jobs.experiments.tune import TuneRequest, tune
from jobs.launch.plan import PlacementOptions
from jobs.train.request import TrainRequest, check_inputs
from jobs.train.tuned import TuningResult

_EXAMPLES = """\
  spr-cluster tune squad --data train.json --model ./my-encoder     the job that you will run
  spr-cluster tune squad --ppn 1,2,4 --ccl-workers 1,2,4 --seconds 30
  spr-cluster tune squad --batch-size 8,16,32                       the batch per rank, too
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "tune",
        "Run short trials of a training job on the cluster, over ranks per node and oneCCL's workers,\n"
        "whose number decides how many threads are left to compute. The fastest is kept on the head;\n"
        "`train` takes it where you give no --ppn and --ccl-workers, and says so. The batch per rank\n"
        "is varied only where --batch-size lists several: it changes what the job learns.",
        _EXAMPLES,
    )
    parser.add_argument("job", choices=("squad",), help="what will be trained")
    add_cluster_options(parser)
    trials = parser.add_argument_group("trials")
    add = trials.add_argument
    add("--ppn", type=numbers, metavar="LIST", help="ranks per node (default: what the nodes suit)")
    add("--ccl-workers", type=numbers, metavar="LIST", help="with oneCCL (default: 1,2)")
    add("--batch-size", dest="batch_sizes", type=numbers, metavar="LIST", help="features per rank")
    add_trial_arguments(add)
    add_training_arguments(parser, without=frozenset({"batch_size"}))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    request = build_request(args)
    check_inputs(request.training.options)
    context = open_job_context(args, datetime.now(timezone.utc))
    best, outcomes = tune(
        context,
        request,
        on_plan=lambda trials: context.on_log(announce(len(trials), request.seconds)),
    )
    print(json.dumps(as_dict(best, outcomes)) if args.json else render(best, outcomes))
    return 0


def build_request(args: argparse.Namespace) -> TuneRequest:
    """The options as a request; raises :class:`UsageError` for one that is out of its range."""

    check_seconds(args.seconds)
    options = read_options(args)
    batch_sizes = args.batch_sizes or (options.batch_size,)
    try:
        for size in batch_sizes:
            replace(options, batch_size=size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    wish = PlacementOptions(fabric=args.fabric)
    grid = TrialGrid(args.ppn, args.ccl_workers, batch_sizes)
    return TuneRequest(TrainRequest(options, Path("results"), wish), grid, args.seconds)


def announce(trials: int, seconds: int) -> str:
    """What will be done, before it is: how many trials, and about how long they take."""

    about = format_seconds(60 * estimate_minutes(trials, seconds))
    if trials == 1:
        return f"1 trial of {seconds} s, and its start-up: about {about}"
    return f"{trials} trials of {seconds} s each, and their start-up: about {about}"


def as_dict(best: TuningResult, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For ``--json``."""

    return {"best": asdict(best), "trials": [as_row(outcome) for outcome in outcomes]}


def render(best: TuningResult, outcomes: Sequence[Outcome]) -> str:
    """The trials as a table, fastest first, and what was kept."""

    ranked = sorted(outcomes, key=lambda outcome: -(outcome.samples_per_second or 0))
    header = ("ppn", "workers", "threads", "batch", "samples/s")
    lines = [format_table([header, *map(_row, ranked)])]
    kept = [f"--ppn {best.nproc_per_node}"]
    kept += [f"--ccl-workers {best.ccl_workers}"] if best.ccl_workers else []
    kept += [f"--batch-size {best.batch_size}"] if best.batch_size else []
    lines.append(
        f"Kept on the head for {best.key.model} on stack {best.key.stack}: {' '.join(kept)}. "
        "`train` takes it, unless you say otherwise."
    )
    if len(outcomes) == 1:
        lines.append("There was nothing to choose from: --ppn 1,2 gives more trials.")
    return "\n".join(lines)


def _row(outcome: Outcome) -> Sequence[str]:
    trial, speed = outcome.trial, outcome.samples_per_second
    return (
        str(trial.nproc_per_node),
        str(trial.ccl_workers or "-"),
        str(outcome.threads or "-"),
        str(trial.batch_size),
        f"failed: {outcome.failure}" if speed is None else f"{speed:.1f}",
    )
