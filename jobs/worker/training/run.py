"""One training run from its options to its results: the phases, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..runtime.job import RunSettings, run_job
from .batches import TrainingRun
from .loop import train
from .model import save_model
from .optimizer_step import load_ipex
from .options import TrainOptions
from .speed_trial import enough_for_trial, measure
from .state import TrainContext, TrainingProgress
from .task import Task


def run_task(kind: type[Task[Any]], argv: Sequence[str] | None = None) -> int:
    """Run a task as this rank; returns its exit code."""
    options = kind.Options.parse(argv, kind.name)
    settings = RunSettings(
        backend=options.backend,
        dtype=options.dtype,
        output=Path(options.output) if options.trial_seconds is None else None,
        resume=options.resume,
        model=options.model_name,
    )
    return run_job(lambda context: train_task(kind(options), context), options, settings)


def train_task(task: Task[Any], context: TrainContext) -> dict[str, Any] | None:
    """Train, save the model, and evaluate it; a trial only measures its speed.

    Returns this job's part of results.json: the task's own figures, of which floats are scores in percent,
    and those of training.
    ``samples_per_second`` is that of training, all ranks together; so is ``tokens_per_second``, without
    padding. ``resumed_after`` are the steps after which an interrupted run was resumed; its ``seconds``
    count all training, but no interruption.
    """
    options, ranks, events = context.options, context.ranks, context.events
    torch.manual_seed(options.seed)
    if options.ipex:
        load_ipex()  # now: a missing extension must not show after minutes
    with context.phase("load"):
        data = task.read(events.note)
        if data.eval_source == data.train_source:
            events.note(
                "no --eval: the figures are on the training data itself, not on unseen data"
            )
        loaded = task.load(context, data)
        if loaded.new_weights:
            events.note(f"new weights, not from the model: {', '.join(loaded.new_weights)}")
    with context.phase("tokenize"):
        records = enough_for_trial(options, data.train, ranks.size)
        samples = task.prepare(context, loaded, records)
        # Before training: a record that can't be used must not show after hours.
        unseen = samples
        if data.eval is not data.train and options.trial_seconds is None:
            unseen = task.prepare(context, loaded, data.eval)
    run = TrainingRun(context, task, loaded, samples)
    if options.trial_seconds is not None:
        with context.phase("measure"):
            speed = measure(run, options.trial_seconds)
        events.emit("trial", **speed._asdict())
        return None
    with context.phase("train"):
        trained = train(run)
    if trained.resumed:
        context.phases.add("train", trained.resumed[-1][1], interrupted=True)
    with context.phase("save"):
        if ranks.first:
            save_model(context.output, loaded)
    with context.phase("evaluate"):
        scores = task.evaluate(context, loaded, data.eval, unseen)
    return {
        **scores,
        "scores": {name: score for name, score in scores.items() if isinstance(score, float)},
        **_describe_training(options, trained, ranks.planned),
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
