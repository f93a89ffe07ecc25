"""One training run from its options to its results, or a trial of its speed, for `spr-cluster tune`."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ..runtime.job import RunSettings, run_job
from ..runtime.steps import how_many
from .batches import Indices, Schedule, TrainingRun, batches, steps_per_epoch
from .best import Unseen, other_data, pick_scores
from .loop import train
from .model import save_model
from .optimizer_step import load_ipex, prepare, take_step
from .options import TrainOptions
from .state import TrainContext, TrainingProgress
from .task import Task

WARM_UPS = 2
"""Untimed steps, in which oneDNN prepares kernels, DDP buckets, and oneCCL threads."""
GAUGED = 2
"""Steps whose duration determines how many steps are measured."""
_FEWEST, _MOST = 5, 2000
_STEPS_OF_RECORDS = 50

Record = TypeVar("Record")


def run_task(kind: type[Task[Any]], argv: Sequence[str] | None = None) -> int:
    """Run a task as this rank; returns its exit code."""
    options = kind.Options.parse(argv, kind.name)
    output = Path(options.output) if options.trial_seconds is None else None
    settings = RunSettings(
        options.backend,
        options.dtype,
        output,
        options.resume,
        options.model_name,
        options.report_to,
    )
    return run_job(lambda context: train_task(kind(options), context), options, settings)


def train_task(task: Task[Any], context: TrainContext) -> dict[str, Any] | None:
    """Train, save the model, and evaluate it; a trial only measures its speed.

    Returns this job's part of results.json: the task's values, of which floats, or those in its ``scores``,
    are scores in percent, and those of training. ``evaluations`` are the scores while training, by their
    ``step``, and ``model_step`` is the step that the model is from. ``samples_per_second`` and
    ``tokens_per_second`` (without padding) are the training speed of all ranks together. ``resumed_after``
    are the steps after which an interrupted run was resumed; its ``seconds`` include all training but no
    interruption.
    """
    options, ranks, events = context.options, context.ranks, context.events
    torch.manual_seed(options.seed)
    if options.ipex:
        load_ipex()  # now: a missing extension must fail early
    with context.phase("load"):
        data = task.read(events.note)
        if not other_data(data):
            events.note(
                "no --eval: the figures are on the training data itself, not on unseen data"
            )
        loaded = task.load(context, data)
        if data.columns:
            loaded.model.config.data_columns = dict(data.columns)
        if loaded.new_weights:
            others = ", ".join(loaded.other_classes)
            why = f" (it has other classes: {shorten(others, 80)})" if others else ""
            events.note(f"new weights, not from the model: {', '.join(loaded.new_weights)}{why}")
    gc.freeze()
    gc.enable()  # `python -m worker.tasks` disables it
    with context.phase("tokenize"):
        records = enough_for_trial(options, data.train, ranks.size)
        samples = task.prepare(context, loaded, records)
        # Before training: an unusable record must not fail the job after hours.
        unseen = samples
        if data.eval is not data.train and options.trial_seconds is None:
            unseen = task.prepare(context, loaded, data.eval)
    run = TrainingRun(context, task, loaded, samples)
    if options.trial_seconds is not None:
        with context.phase("measure"):
            speed = measure_speed(run, options.trial_seconds)
        events.emit("trial", **speed._asdict())
        return None
    with context.phase("train"):
        trained, step = train(run, Unseen(data.eval, unseen, other_data(data)))
    if trained.resumed:
        context.phases.add("train", trained.resumed[-1][1], interrupted=True)
    with context.phase("save"):
        if ranks.first:
            save_model(context.output, loaded)
    with context.phase("evaluate"):
        scores = task.evaluate(context, loaded, data.eval, unseen)
    return {
        **scores,
        "scores": pick_scores(scores),
        **_describe_training(options, trained, ranks.planned),
        "model_step": step,
        "train_records": len(data.train),
        "train_samples": len(samples),
        "eval_records": len(data.eval),
        "data": data.train_source,
        "eval_data": data.eval_source,
        "task": task.name,
    }


def _describe_training(
    options: TrainOptions, trained: TrainingProgress, ranks: int
) -> dict[str, Any]:
    return {
        "loss_curve": trained.curve,
        "evaluations": trained.evaluations,
        "resumed_after": [step for step, _ in trained.resumed],
        "samples_per_second": round(trained.samples / trained.seconds, 3),
        "tokens_per_second": round(trained.tokens / trained.seconds, 1),
        "batch_size_per_rank": options.batch_size,
        "epochs": options.epochs,
        "learning_rate": options.highest_rate(ranks),
        "seed": options.seed,
        "model": options.model_name,
        "recipe": "fast",
    }


class TrialSpeed(NamedTuple):
    """The speed of all ranks, in samples per second, without the warm-up.

    ``gradient_bytes`` is the amount a rank sends per step; 0 for a single rank.
    """

    samples_per_second: float
    steps: int
    seconds: float
    gradient_bytes: int


def enough_for_trial(
    options: TrainOptions, records: Sequence[Record], ranks: int
) -> Sequence[Record]:
    """Return all records or, for a trial, a random part: tokenizing all of SQuAD would take too long."""
    wanted = _STEPS_OF_RECORDS * options.batch_size * ranks
    if options.trial_seconds is None or len(records) <= wanted:
        return records
    return random.Random(options.seed).sample(records, wanted)


def measure_speed(run: TrainingRun, seconds: float) -> TrialSpeed:
    """Train for about ``seconds`` on all ranks and return the speed; the model is useless afterward."""
    context, samples = run.context, run.samples
    options, ranks = context.options, context.ranks
    # 0 steps: automatic compilation would take longer than the trial.
    model, optimizer = prepare(run, steps=0)

    def take(steps: Iterable[Indices]) -> tuple[int, float]:
        count, begin = 0, time.perf_counter()
        for chosen in steps:
            take_step(run, model, optimizer, run.batch(chosen))
            count += len(chosen)
        return count, time.perf_counter() - begin

    per_epoch = steps_per_epoch(len(samples), options.batch_size, ranks.size)
    take(batches(context, run.lengths, Schedule(per_epoch, WARM_UPS, 0)))
    _, taken = take(batches(context, run.lengths, Schedule(per_epoch, GAUGED, 0)))
    # All ranks must agree on the number, or some would wait forever.
    steps: int = ranks.share(how_many(seconds, taken / GAUGED, _FEWEST, _MOST))
    chosen, schedule = plan_measure(len(samples), options, ranks.size, steps)
    before = getattr(model, "sent_bytes", 0)
    part = batches(context, run.lengths[chosen], schedule)
    count, taken = take(chosen[batch] for batch in part)
    sent = (getattr(model, "sent_bytes", 0) - before) // schedule.total
    return TrialSpeed(round(count / taken, 3), schedule.total, round(taken, 3), sent)


def plan_measure(
    count: int, options: TrainOptions, ranks: int, steps: int
) -> tuple[Indices, Schedule]:
    """Return samples, as indices, and a schedule of whole epochs, with about ``steps`` steps.

    Batches have samples of similar length: with parts of epochs, a trial might be faster only because
    its texts were shorter.
    """
    per_epoch = steps_per_epoch(count, options.batch_size, ranks)
    if steps >= per_epoch:
        return np.arange(count), Schedule(per_epoch, -(-steps // per_epoch) * per_epoch, 0)
    wanted = random.Random(options.seed).sample(range(count), steps * options.batch_size * ranks)
    return np.array(wanted), Schedule(steps, steps, 0)
