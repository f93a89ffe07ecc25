"""What `train squad` is told, as requests: a new job, the published recipe, one that goes on."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path

from infra.errors import UsageError
from jobs.launch.plan import PlacementOptions, new_job_id
from jobs.train.presets import PRESETS
from jobs.train.reference import ReferenceRequest, check_script
from jobs.train.request import TrainRequest, check_folder, expand_home
from jobs.train.resume import ResumeRequest
from jobs.worker.squad.options import DEMO, MAY_CHANGE, TrainOptions, flag, from_namespace

LAST = "the last unfinished one"
# What a resumed job may have otherwise than before, beside what is learned from the same data.
_MAY_CHANGE_TOO = MAY_CHANGE | {"checkpoint_every", "keep_checkpoints"}


def build_resume(args: argparse.Namespace) -> ResumeRequest:
    """The wish to continue a job; raises :class:`UsageError` for what would make it another one."""

    given = {each.name for each in fields(TrainOptions)} & vars(args).keys() - {"resume"}
    other = {flag(name) for name in given - _MAY_CHANGE_TOO}
    other |= {"--demo"} if args.demo else set()
    other |= {"--placement"} if args.placement != "auto" else set()
    other |= {"--ccl-workers"} if args.ccl_workers else set()
    other |= {"--fabric"} if args.fabric != "tcp" else set()
    other |= {"--nodes"} if args.nodes else set()
    other |= {"--recipe"} if args.recipe != "fast" else set()
    other |= {flag(name) for name in ("preset", "smoke", "run_qa") if getattr(args, name)}
    if other:
        raise UsageError(
            f"{', '.join(sorted(other))}: a resumed job keeps its own",
            hint="leave it out, or start a new job without --resume",
        )
    _check_counts(args)
    changes = {name: getattr(args, name) for name in given}
    try:
        replace(TrainOptions(), **changes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    job = None if args.resume == LAST else args.resume
    results = expand_home(args.results) if args.results else None
    if results:
        check_folder(results)
    return ResumeRequest(job, results, changes, args.ppn)


def _check_counts(args: argparse.Namespace) -> None:

    counts = {"--nodes": args.nodes, "--ppn": args.ppn, "--ccl-workers": args.ccl_workers}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: expected a whole number from 1 on")


def build_request(args: argparse.Namespace, now: datetime) -> TrainRequest:
    """The options as a request; raises :class:`UsageError` for one that is out of its range."""

    _check_counts(args)
    for name, given in {"--smoke": args.smoke, "--run-qa": args.run_qa}.items():
        if given:
            raise UsageError(f"{name} goes with --recipe reference")
    if args.demo and args.preset:
        raise UsageError("--demo and --preset exclude each other: give one of them")
    options = read_options(args, args.preset)
    results = expand_home(args.results or str(Path("results", new_job_id("squad", now))))
    wish = PlacementOptions(args.placement, args.ppn, args.ccl_workers, args.fabric)
    return TrainRequest(options, results, wish, left_open(args), args.nodes)


def read_options(args: argparse.Namespace, preset: str | None = None) -> TrainOptions:
    """The training options of a new job; raises :class:`UsageError` for one out of its range."""

    base = DEMO if args.demo else TrainOptions()
    base = PRESETS[preset].as_options(base) if preset else base
    if args.demo and "dataset" in args:
        base = replace(base, data=None)
    for key in ("data", "eval"):
        if getattr(args, key, None):
            setattr(args, key, str(expand_home(getattr(args, key))))
    try:
        return from_namespace(args, base)
    except ValueError as error:
        raise UsageError(str(error)) from None


def build_reference(args: argparse.Namespace, now: datetime) -> ReferenceRequest:
    """The published recipe's request; raises :class:`UsageError` for what it leaves no choice of."""

    _check_counts(args)
    senseless = sorted({each.name for each in fields(TrainOptions)} & vars(args).keys())
    senseless += [
        name for name in ("ppn", "ccl_workers", "demo", "no_tuned") if getattr(args, name)
    ]
    if senseless:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in senseless)
        raise UsageError(
            f"{flags}: --recipe reference is the published command, with its own settings",
            hint="--preset and --nodes choose among those; --recipe fast takes the options",
        )
    if args.smoke and args.nodes not in (None, 1):
        raise UsageError("--smoke is for one node: leave --nodes out")
    if args.smoke and args.push_to:
        raise UsageError("--smoke trains no model: leave --push-to out")
    results = Path(args.results or Path("results", new_job_id("squad", now)))
    return ReferenceRequest(
        preset=PRESETS[args.preset or "distilbert"],
        results=expand_home(str(results)),
        nodes=args.nodes,
        script=check_script(expand_home(args.run_qa)) if args.run_qa else None,
        smoke=args.smoke,
        fabric=args.fabric,
    )


def left_open(args: argparse.Namespace) -> frozenset[str]:
    """What `tune` may decide, as the user said nothing of it."""
    if args.no_tuned or args.placement != "auto":
        return frozenset()
    chosen = "batch_size" in args or getattr(args, "preset", None)
    batch_size = set() if chosen else {"batch_size"}
    placement = set() if args.ppn or args.ccl_workers else {"placement"}
    return frozenset(batch_size | placement)
