"""``spr-cluster tune``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.chosen_cluster import add_cluster_options
from cluster.console.display import format_seconds, format_table
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.chosen_job import open_job_context
from jobs.cli.job_options import (
    add_tasks,
    add_trial_options,
    check_seconds,
    numbers,
    read_options,
)
from jobs.experiments.tune import (
    Trial,
    TrialGrid,
    TrialResult,
    TuneRequest,
    as_row,
    estimate_minutes,
    tune,
)
from jobs.launchers.plan import PlacementOptions
from jobs.train.request import TrainRequest, check_inputs
from jobs.train.tuned import TuningResult

_EXAMPLES = """\
  spr-cluster tune {task} --data train.json --model ./my-encoder
  spr-cluster tune {task} --ppn 1,2,4 --ccl-workers 1,2,4 --seconds 30
  spr-cluster tune {task} --batch-size 8,16,32      compare batch sizes, too
"""

_ABOUT = (
    "Find the fastest placement of a training job: run short trials with different numbers of\n"
    "ranks per node and oneCCL workers. The head keeps the result, and `train` uses it unless\n"
    "you set --ppn or --ccl-workers. The batch size per rank varies only if --batch-size lists\n"
    "several, because it changes what the job learns."
)


def add_parser(subparsers: SubParsers) -> None:
    tune = add_command(subparsers, "tune", _ABOUT, _EXAMPLES.replace("{task}", "squad"))
    for task, parser in add_tasks(tune, _ABOUT, _EXAMPLES, run):
        add_cluster_options(parser)
        trials = parser.add_argument_group("trials")
        for option, dest, text in (
            ("--ppn", "ppn", "ranks per node (default: what suits the nodes)"),
            ("--ccl-workers", "ccl_workers", "oneCCL workers per rank (default: 1,2)"),
            ("--batch-size", "batch_sizes", "features per rank"),
        ):
            trials.add_argument(option, dest=dest, type=numbers, metavar="LIST", help=text)
        add_trial_options(parser, trials, task, "batch_size")


def run(args: argparse.Namespace) -> int:
    request = build_request(args)
    check_inputs(request.training.options)
    context = open_job_context(args, datetime.now(timezone.utc))
    best, results = tune(
        context,
        request,
        on_plan=lambda trials: context.on_log(describe_trials(len(trials), request.seconds)),
    )
    rows = [as_row(*each) for each in results.items()]
    emit(args, lambda: render(best, results), {"best": asdict(best), "trials": rows})
    return 0


def build_request(args: argparse.Namespace) -> TuneRequest:
    """Return the options as a request. Raises :class:`UsageError` for one out of range."""
    check_seconds(args.seconds)
    options = read_options(args)
    batch_sizes = args.batch_sizes or (options.batch_size,)
    try:
        for size in batch_sizes:
            replace(options, batch_size=size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    grid = TrialGrid(args.ppn, args.ccl_workers, batch_sizes)
    training = TrainRequest(options, Path("results"), PlacementOptions())
    return TuneRequest(training, grid, args.seconds)


def describe_trials(trials: int, seconds: int) -> str:
    """Return one line: how many trials, and about how long they take."""
    about = format_seconds(60 * estimate_minutes(trials, seconds))
    return f"{counted(trials, 'trial')} of {seconds} s each: about {about} including start-up"


def render(best: TuningResult, results: Mapping[Trial, TrialResult]) -> str:
    """Return the trials as a table, fastest first, and what was kept."""
    ranked = sorted(results.items(), key=lambda each: -(each[1].samples_per_second or 0))
    header = ("ppn", "workers", "threads", "batch", "samples/s")
    lines = [format_table([header, *(_row(*each) for each in ranked)])]
    kept = [f"--ppn {best.nproc_per_node}"]
    kept += [f"--ccl-workers {best.ccl_workers}"] if best.ccl_workers else []
    kept += [f"--batch-size {best.batch_size}"] if best.batch_size else []
    lines.append(
        f"Kept on the head for {best.key.model} on stack {best.key.stack}: {' '.join(kept)}. "
        "`train` uses it unless you set these options."
    )
    if len(results) == 1:
        lines.append("Only one trial ran; --ppn 1,2 compares two.")
    return "\n".join(lines)


def _row(trial: Trial, result: TrialResult) -> Sequence[str]:
    speed = result.samples_per_second
    return (
        str(trial.nproc_per_node),
        str(trial.ccl_workers or "-"),
        str(result.threads or "-"),
        str(trial.batch_size),
        f"failed: {result.failure}" if speed is None else f"{speed:.1f}",
    )
