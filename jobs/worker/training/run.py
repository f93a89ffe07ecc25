"""One training run from its options to its results: data, model, steps, and scores."""

from __future__ import annotations

import gc
import math
import os
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from ..fast.compilation import count_compiled, plain_layers
from ..fast.embedding import restore_words
from ..fast.first_token import compute_all_tokens
from ..fast.layers import freeze_layers
from ..fast.optimizer import restore_weights
from ..fast.parts import INT8_PRODUCTS, find_parts
from ..runtime.errors import ModelError, TrainingError, first_line
from ..runtime.events import name_files
from ..runtime.job import RunSettings, run_job
from ..runtime.output import Metrics, StepFigures, replacing
from ..runtime.precision import Precision
from ..runtime.process import listen
from ..runtime.steps import Pace, StepReporter
from .batches import Schedule, TrainingRun, batches, plan_schedule
from .best import Unseen, plan_evaluation
from .between_steps import Loop, after_step, evaluate, resume
from .card import render_card
from .checkpoints import Checkpoint, CheckpointTimer, count_saved, expect_checkpoints, identify
from .export import export_model, require_convertible, require_packages
from .hub import push_model
from .model import save_model
from .optimizer_step import count_parts, load_ipex, prepare, take_step
from .options import BASE_MODEL, SCRATCH, EncoderOptions, TextOptions, TrainOptions
from .state import State, TrainContext, TrainingProgress
from .task import FILES, Data, Loaded, Task, pick_scores
from .teacher import ask_teacher
from .trial import enough_for_trial, measure_speed

FEW_STEPS = 200
"""With fewer steps, a pretrained model has hardly begun to learn."""
CURVE_POINTS = 500
"""Approximate number of points in the loss curve, for any number of steps."""


def run_task(kind: type[Task[Any]], options: TrainOptions) -> int:
    """Run a task as this rank; returns its exit code."""
    output = Path(options.output) if options.trial_seconds is None else None
    settings = RunSettings(
        options.backend,
        output,
        options.dtype,
        options.resume,
        options.model_name,
        options.report_to,
    )
    return run_job(lambda context: train_task(kind(options), context), options, settings)


def train_task(task: Task[Any], context: TrainContext) -> dict[str, Any] | None:
    """Train, save the model, and evaluate it; a trial only measures its speed.

    Returns this job's part of results.json: the task's values, of which floats, or those in its ``scores``,
    are scores in percent, and those of training. ``evaluations`` are the scores while training, by their
    ``step``, and ``model_step`` is the step that the model is from. ``data_digest`` is that of the training
    samples, ``eval_digest`` of the records for the scores; files have the user's names. ``fast`` are the
    parts of the fast path that were active. ``samples_per_second`` and ``tokens_per_second`` (without
    padding) are the training speed of all ranks together. ``resumed_after`` are the steps after which an
    interrupted run was resumed; its ``seconds`` include all training but no interruption.
    """
    options, ranks, events = context.options, context.ranks, context.events
    torch.manual_seed(options.seed)
    if options.ipex:
        load_ipex()  # now: a missing extension must fail early
    exports = isinstance(options, EncoderOptions) and options.export is not None
    if exports:
        require_packages()
    with context.phase("load"):
        data, loaded = _load(task, context)
    gc.freeze()
    gc.enable()  # `python -m worker.tasks` disables it
    with context.phase("tokenize"):
        records = enough_for_trial(options, data.train, ranks.size)
        samples = task.prepare(context, loaded, records)
        # Before training: an unusable record must not fail the job after hours.
        unseen = samples
        if data.eval is not data.train and options.trial_seconds is None:
            unseen = task.prepare(context, loaded, data.eval)
        # Nothing learns them in a run that only evaluates.
        samples = task.finish(context, loaded, samples) if options.epochs else samples
    run = TrainingRun(context, task, loaded, samples)
    if options.trial_seconds is not None:
        with context.phase("measure"):
            speed = measure_speed(run, options.trial_seconds, len(data.train))
        events.emit("trial", **speed._asdict())
        return None
    if exports:
        require_convertible(run)
    if options.epochs:
        run = replace(run, taught=ask_teacher(task, context, records))
    with context.phase("train"):
        loop = train(run, Unseen(data.eval, unseen, data.has_unseen))
    if loop.progress.resumed:
        context.phases.add("train", loop.progress.resumed[-1][1], interrupted=True)
    with context.phase("save"):
        if ranks.first:
            save_model(context.output, loaded)
    with context.phase("evaluate"):
        scores = loop.evaluator.evaluate_model(loop.progress)
    figures = {name: each for name, each in scores.items() if name not in FILES}
    figures |= {"scores": pick_scores(scores), **_describe(loop, data)}
    if exports:
        with context.phase("export"):
            figures["export"] = export_model(run, loop.evaluator.unseen, scores)
    if ranks.first:
        figures["eval_digest"] = _digest(data.eval)
        _write_card(run, figures)
    if not options.push_to:
        return figures
    with context.phase("push"):
        return {**figures, **push_model(context, options.push_to, loop.progress.model_step)}


def _load(task: Task[Any], context: TrainContext) -> tuple[Data, Loaded]:
    note = context.events.note
    data = task.read(note)
    task.check_data(data)
    if not data.has_unseen:
        note("no --eval: the figures are on the training data itself, not on unseen data")
    loaded = task.load(context, data)
    if not context.options.epochs and context.options.model_name in (None, SCRATCH):
        raise ModelError("--epochs 0 needs a trained model", hint="--model names its folder")
    if isinstance(context.options, TextOptions):
        freeze_layers(loaded.model, context.options.freeze_layers)
    if data.columns:
        loaded.model.config.data_columns = dict(data.columns)
    if loaded.new_weights:
        others = ", ".join(loaded.other_classes)
        why = f" (it has other classes: {shorten(others, 80)})" if others else ""
        if not context.options.epochs:
            raise ModelError(
                f"--epochs 0: the model has no trained {', '.join(loaded.new_weights)}{why}",
                hint="evaluate a model that was trained on data with the same classes",
            )
        note(f"new weights, not from the model: {', '.join(loaded.new_weights)}{why}")
    return data, loaded


def _write_card(run: TrainingRun, figures: dict[str, Any]) -> None:
    """Write the model's card. An error must not fail a job that has trained for hours."""
    context = run.context
    try:
        card = render_card(context, run.task, run.loaded, figures, run.samples.digest())
        with replacing(context.output / "model" / "README.md") as path:
            path.write_text(card, encoding="utf-8", errors="replace")
    except Exception as error:
        context.events.note(f"warning: the model has no card: {first_line(error)}")


def _describe(loop: Loop, data: Data) -> dict[str, Any]:
    run, trained = loop.run, loop.progress
    options, ranks = run.context.options, run.context.ranks.planned
    return {
        "loss_curve": trained.curve,
        "evaluations": trained.evaluations,
        "model_step": trained.model_step,
        "resumed_after": [step for step, _ in trained.resumed],
        **_speed(trained),
        "batch_size_per_rank": options.batch_size,
        "epochs": options.epochs,
        "learning_rate": options.highest_rate(ranks),
        "seed": options.seed,
        "model": os.environ.get(BASE_MODEL) or options.model_name,
        "recipe": "fast",
        "fast": loop.fast,
        "train_records": len(data.train),
        "train_samples": len(run.samples),
        "eval_records": len(data.eval),
        **actual_precision(run.context.precision, loop.fast),
        "data": name_files(data.train_source),
        "data_digest": loop.checkpoint.identity.features,
        "eval_data": name_files(data.eval_source),
        "task": run.task.name,
    }


def _digest(records: Iterable[Any]) -> str:
    """Return a digest of the records alone: it depends on no file's name and on no tokenizer."""
    digest = blake2b(digest_size=16)
    for record in records:
        each = record._replace(place="") if hasattr(record, "place") else record
        digest.update(pickle.dumps(each, protocol=4))
    return digest.hexdigest()


def actual_precision(asked: Precision, fast: Sequence[str]) -> dict[str, str]:
    """Return what replaces the run's precision in its results if int8 was asked for and not used."""
    if not asked.int8 or INT8_PRODUCTS in fast:
        return {}
    return {
        "dtype": asked.dtype,
        "dtype_reason": f"int8 was not used (see the log); {asked.reason}",
    }


def _speed(trained: TrainingProgress) -> dict[str, float]:
    if not trained.step:
        return {}
    return {
        "samples_per_second": round(trained.samples / trained.seconds, 3),
        "tokens_per_second": round(trained.tokens / trained.seconds, 1),
    }


def train(run: TrainingRun, unseen: Unseen) -> Loop:
    """Train the loaded model in place on all ranks.

    Raises :class:`TrainingError` if the loss diverges, :class:`CheckpointError` if the run can't be
    resumed, and :class:`StoppedError` after a SIGTERM.
    """
    context, model = run.context, run.loaded.model
    options, ranks = context.options, context.ranks
    schedule = plan_schedule(options, len(run.samples), ranks.planned)
    _note_fewer_ranks(context)
    _note_few_steps(context, schedule)
    evaluator = plan_evaluation(run, unseen, schedule)
    torch.manual_seed(options.seed + ranks.rank)  # other dropout on each rank
    saved = count_saved(model)
    trained, optimizer = prepare(run, schedule.total)
    ground = {
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "backend": ranks.backend,
        "threads per rank": str(torch.get_num_threads()),
        "compiled layers": str(count_compiled(model)),
    }
    identity = identify(options, ranks, context.precision.name, run, ground)
    start = Checkpoint(identity, TrainingProgress())
    timer = CheckpointTimer(options.checkpoint_every)
    rate = optimizer.param_groups[0]["lr"]
    state = State(model, optimizer, {})
    loop = Loop(run, schedule, evaluator, state, trained, start, timer, rate)
    if schedule.total:
        keeps_best = bool(evaluator.every) and options.keep == "best"
        expect_checkpoints(context, model, schedule.total, saved, keeps_best=keeps_best)
    if options.resume:
        resume(loop)
    _take_steps(loop)
    evaluator.take_best(loop.progress, state)
    loop.fast = find_parts(model)
    plain_layers(model)
    restore_weights(model)
    restore_words(model)
    compute_all_tokens(model)
    return loop


def _note_few_steps(context: TrainContext, schedule: Schedule) -> None:
    total, options = schedule.total, context.options
    if 0 < total < FEW_STEPS and options.max_steps is None:
        enough = min(-(-FEW_STEPS // schedule.per_epoch), 10 * options.epochs)
        context.events.note(
            f"{total} {'steps are' if total > 1 else 'step is'} few to learn from (less than {FEW_STEPS}): "
            f"--epochs {enough}, a smaller --batch-size, or fewer ranks give more"
        )


def _note_fewer_ranks(context: TrainContext) -> None:
    ranks = context.ranks
    if ranks.size == ranks.planned:
        return
    samples = context.options.batch_size * ranks.planned
    least, rest = divmod(samples, ranks.size)
    each = f"at most {least + 1}" if rest else f"{least}"
    uneven = ", which does not divide evenly" if rest else ""
    parts = count_parts(context.options, least + bool(rest))
    context.events.note(
        f"{ranks.size} of {ranks.planned} planned ranks: the same {samples} features per step, {each} on "
        f"each rank in {parts} parts{uneven}"
    )


def _take_steps(loop: Loop) -> None:
    run, schedule, progress, context = loop.run, loop.schedule, loop.progress, loop.context
    # Skipped rather than computed differently, so that the batches are the same by construction.
    rest = islice(batches(context, run.lengths, schedule), progress.step, None)
    first = progress.step + 1
    metrics = Metrics(context.output, context.ranks.rank, context.events.note)
    pace, check = Pace(context.ranks, context.hosts), partial(_check_loss, loop)
    steps = schedule.total, schedule.per_epoch, progress.step, progress.samples, progress.tokens
    with listen() as request, metrics:
        reporter = StepReporter(context.events, metrics, pace, request, check, *steps)
        evaluate(loop, reporter)  # after the last step of an interrupted run
        begin = time.perf_counter() - progress.seconds
        ended = time.perf_counter()
        for number, chosen in enumerate(rest, start=first):
            if loop.evaluator.is_exhausted(progress):
                break
            rate = loop.highest_rate * schedule.rate(number - 1)
            for group in loop.state.optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            batch = run.batch(chosen)
            fetched = time.perf_counter()
            step = take_step(run, loop.trained, loop.state.optimizer, batch)
            seconds = {"data": fetched - ended, **step.seconds}
            ended = time.perf_counter()
            progress.step, progress.seconds = number, ended - begin
            counts = len(batch), batch.tokens, batch.padded
            figures = StepFigures(number, progress.seconds, step.loss, rate, *counts, seconds)
            begin += after_step(loop, reporter, figures)
            if number == first:
                exempt_from_collection()
            ended = time.perf_counter()  # a checkpoint's time is not data-loading time
    gc.unfreeze()


def exempt_from_collection() -> None:
    """Exempt all objects so far from garbage collection.

    Traversing those of torch and its compiler again and again would take 3 % of the CPU time.
    """
    gc.collect()
    gc.freeze()


def _check_loss(loop: Loop, figures: StepFigures) -> StepFigures:
    """Record a step's loss. Raises :class:`TrainingError` if it is infinite or has diverged."""
    number, progress, total = figures.step, loop.progress, loop.schedule.total
    if not math.isfinite(figures.loss):
        raise TrainingError(
            f"the loss or its gradient became infinite at step {number} of {total}",
            hint="lower --learning-rate, or use --dtype fp32" + _resume_hint(loop),
        )
    watch = progress.watch
    watch.see(figures.loss)
    if watch.diverged:
        raise TrainingError(
            f"the loss diverged: at step {number} of {total} it is about {watch.level:.2f}, "
            f"after {watch.best:.2f} at its best",
            hint="lower --learning-rate, or raise --warmup-ratio" + _resume_hint(loop),
        )
    if watch.is_stuck(total):
        loop.context.events.note(
            f"warning: at step {number} of {total} the loss has hardly changed: {watch.level:.2f}, "
            f"after {watch.first:.2f} at the beginning. Check the labels and --learning-rate"
        )
    every = -(-total // CURVE_POINTS)
    if number % every == 0 or number == total:
        progress.curve.append((number, round(figures.loss, 5)))
    return figures


def _resume_hint(loop: Loop) -> str:
    return f", with --resume from {loop.kept}, which is kept" if loop.kept else ""
