"""Requests of `train TASK` from its options: a new job, the published recipe, or a resumed job."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from infra.errors import UsageError
from jobs.cli.job_options import read_placement, results_folder
from jobs.reference.plan import ReferenceRequest, check_script
from jobs.reference.presets import PRESETS
from jobs.train.request import TrainRequest, check_writable, expand_home
from jobs.train.resume import ResumeRequest
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import MAY_CHANGE, TrainOptions, flag

RETRIES = 1
LAST = "the last unfinished one"
# Options that a resumed job may change, beside those that do not affect what it learns.
_RESUME_MAY_CHANGE = MAY_CHANGE | {"checkpoint_every", "keep_checkpoints"}


_DEFAULTS = {"placement": "auto", "recipe": "fast"}


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
    job = None if args.resume == LAST else args.resume
    results = expand_home(args.results) if args.results else None
    if results:
        check_writable(results)
    return ResumeRequest(args.task, job, results, changes, args.ppn, _retries(args))


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
    )


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


def build_reference(args: argparse.Namespace, now: datetime) -> ReferenceRequest:
    """Return the published recipe's request. Raises :class:`UsageError` for options that it fixes."""
    refuse_own_settings(args, ("ppn", "ccl_workers", "demo", "no_tuned", "elastic", "retries"))
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


def _retries(args: argparse.Namespace) -> int:
    return RETRIES if args.retries is None else int(args.retries)


def left_open(args: argparse.Namespace) -> frozenset[str]:
    """Return what `tune` may decide because the user did not."""
    if args.no_tuned or args.placement != "auto":
        return frozenset()
    chosen = "batch_size" in args or getattr(args, "preset", None)
    batch_size = set() if chosen else {"batch_size"}
    placement = set() if args.ppn or args.ccl_workers else {"placement"}
    return frozenset(batch_size | placement)
