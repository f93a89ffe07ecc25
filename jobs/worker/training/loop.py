"""Training loop: steps, divergence checks, checkpoints, resume.

An interrupted run takes the same steps, bit for bit, as one without interruption: batches and rates follow
from the step's number, and everything else is in the checkpoint.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch

from ..fast.compilation import count_compiled, plain_layers
from ..fast.embedding import restore_words
from ..fast.optimizer import restore_weights
from ..runtime.errors import CheckpointError, TrainingError
from ..runtime.output import StepFigures
from ..runtime.steps import StepReporter
from .batches import Schedule, TrainingRun, batches, plan_schedule
from .best import Evaluator, Unseen, plan_evaluation
from .checkpoints import (
    Checkpoint,
    CheckpointTimer,
    identify,
    load_state,
    newest_undamaged,
    prune,
    require_same,
    save_checkpoint,
)
from .optimizer_step import Step, count_parts, prepare, take_step
from .state import State, TrainContext, TrainingProgress

FEW_STEPS = 200
"""With fewer steps, a pretrained model has hardly begun to learn."""
CURVE_POINTS = 500
"""Approximate number of points in the loss curve, for any number of steps."""


@dataclass
class Loop:
    """One rank's training between two steps."""

    run: TrainingRun
    schedule: Schedule
    evaluator: Evaluator
    state: State
    trained: Any
    """The model, wrapped for data-parallel training."""
    checkpoint: Checkpoint
    timer: CheckpointTimer
    highest_rate: float
    kept: str = ""
    """The newest checkpoint's name; the same on every rank."""

    @property
    def context(self) -> TrainContext:
        return self.run.context

    @property
    def progress(self) -> TrainingProgress:
        return self.checkpoint.progress


def train(run: TrainingRun, unseen: Unseen) -> tuple[TrainingProgress, int]:
    """Train the loaded model in place on all ranks; return also the step that the model is from.

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
    trained, optimizer = prepare(run, schedule.total)
    ground = {
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "backend": ranks.backend,
        "threads per rank": str(torch.get_num_threads()),
        "compiled layers": str(count_compiled(model)),
    }
    identity = identify(options, ranks, context.precision.dtype, run.samples, ground)
    start, timer = (
        Checkpoint(identity, TrainingProgress()),
        CheckpointTimer(options.checkpoint_every),
    )
    rate = optimizer.param_groups[0]["lr"]
    state = State(model, optimizer, {})
    loop = Loop(run, schedule, evaluator, state, trained, start, timer, rate)
    if options.resume:
        _resume(loop)
    _take_steps(loop)
    step = evaluator.take_best(loop.progress, state)
    plain_layers(model)
    restore_weights(model)
    restore_words(model)
    return loop.progress, step


def _note_few_steps(context: TrainContext, schedule: Schedule) -> None:
    total, options = schedule.total, context.options
    if total < FEW_STEPS and options.max_steps is None:
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


def _resume(loop: Loop) -> None:
    """Load rank 0's newest checkpoint; without one, training starts over."""
    context, ranks = loop.context, loop.context.ranks
    found = newest_undamaged(context.output, context.events.note) if ranks.first else None
    newest, saved = found or (None, None)
    changes = require_same(saved.identity, loop.checkpoint.identity) if saved else []
    saved = ranks.share(saved)
    if saved is None:
        context.events.note(f"no checkpoint in {context.output}: training starts over")
        return
    _warm_up(loop)
    load_state(newest, loop.state, ranks)
    loop.checkpoint = Checkpoint(loop.checkpoint.identity, saved.progress)
    progress = loop.progress
    if progress.step > loop.schedule.total:
        raise CheckpointError(
            f"the checkpoint is at step {progress.step}, and the run has only {loop.schedule.total} steps",
            hint="raise --epochs or --max-steps to at least the original value",
        )
    progress.resumed.append((progress.step, progress.seconds))
    loop.kept = ranks.share(newest.name if newest else "")
    # The interrupted run may have ended before removing an old checkpoint.
    _prune(loop)
    context.events.emit("resumed", step=progress.step, total=loop.schedule.total)
    if changes:
        context.events.note(
            f"resumed with {', '.join(changes)}: results will differ from the original run's"
        )


def _warm_up(loop: Loop) -> None:
    """Take a step whose result is discarded.

    After its first step, DDP rearranges the gradients, which decides the last bit of a sum over three or
    more ranks.
    """
    run = loop.run
    chosen = next(batches(loop.context, run.lengths, loop.schedule))
    take_step(run, loop.trained, loop.state.optimizer, run.batch(chosen))


def _take_steps(loop: Loop) -> None:
    run, schedule, progress = loop.run, loop.schedule, loop.progress
    # Skipped rather than computed differently, so that the batches are the same by construction.
    steps = batches(run.context, run.lengths, schedule)
    rest, first = islice(steps, progress.step, None), progress.step + 1
    with run.context.report_steps(
        schedule.total,
        schedule.per_epoch,
        done=progress.step,
        samples=progress.samples,
        tokens=progress.tokens,
    ) as reporter:
        # The step before may be the last one of an interrupted run.
        _evaluate(loop, reporter)
        begin = time.perf_counter() - progress.seconds
        ended = time.perf_counter()
        for number, chosen in enumerate(rest, start=first):
            if loop.evaluator.is_exhausted(progress):
                _note_early_end(loop)
                break
            rate = loop.highest_rate * schedule.rate(number - 1)
            for group in loop.state.optimizer.param_groups:
                group["lr"] = rate
            batch = run.batch(chosen)
            fetched = time.perf_counter()
            step = take_step(run, loop.trained, loop.state.optimizer, batch)
            seconds = {"data": fetched - ended, **step.seconds}
            ended = time.perf_counter()
            progress.step, progress.seconds = number, ended - begin
            counts = len(batch), batch.tokens, batch.padded
            figures = StepFigures(number, progress.seconds, step.loss, rate, *counts, seconds)
            _check_loss(loop, step)
            begin += _after_step(loop, reporter, figures)
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


def _check_loss(loop: Loop, step: Step) -> None:
    """Record the loss. Raises :class:`TrainingError` if it is infinite or has diverged."""
    progress, total = loop.progress, loop.schedule.total
    if not math.isfinite(step.loss):
        raise TrainingError(
            f"the loss or its gradient became infinite at step {progress.step} of {total}",
            hint="lower --learning-rate, or use --dtype fp32" + _resume_hint(loop),
        )
    watch = progress.watch
    watch.see(step.loss)
    if watch.diverged:
        raise TrainingError(
            f"the loss diverged: at step {progress.step} of {total} it is about {watch.level:.2f}, "
            f"after {watch.best:.2f} at its best",
            hint="lower --learning-rate, or raise --warmup-ratio" + _resume_hint(loop),
        )
    if watch.is_stuck(total):
        loop.context.events.note(
            f"warning: at step {progress.step} of {total} the loss has hardly changed: {watch.level:.2f}, "
            f"after {watch.first:.2f} at the beginning. Check the labels and --learning-rate"
        )
    every = -(-total // CURVE_POINTS)
    if progress.step % every == 0 or progress.step == total:
        progress.curve.append((progress.step, round(step.loss, 5)))


def _resume_hint(loop: Loop) -> str:
    return f", with --resume from {loop.kept}, which is kept" if loop.kept else ""


def _evaluate(loop: Loop, reporter: StepReporter) -> float:
    """Evaluate the model if it is due; return the seconds, which are not training time."""
    if not loop.evaluator.is_due(loop.progress):
        return 0.0
    seconds = loop.evaluator.evaluate(loop.progress, loop.state)
    reporter.pace.pause(seconds)
    return seconds


def _note_early_end(loop: Loop) -> None:
    best = loop.evaluator.best(loop.progress)
    assert best is not None
    loop.context.events.note(
        f"training ends after step {loop.progress.step} of {loop.schedule.total}: none of the last "
        f"{loop.context.options.patience} evaluations was better than that of step {best['step']:.0f}"
    )


def _after_step(loop: Loop, reporter: StepReporter, figures: StepFigures) -> float:
    """Report the step; then evaluate, save a checkpoint, or stop, if all ranks agree.

    Returns the seconds of the evaluation.
    """
    progress, last = loop.progress, figures.step == loop.schedule.total
    due = loop.timer.by_step(figures.step, last=last)
    busy = sum(figures.seconds.values()) - figures.seconds.get("communication", 0.0)
    agreed = reporter.take(figures, busy, talk=due, save=loop.timer.by_time(last=last))
    progress.samples, progress.tokens = reporter.samples, reporter.tokens
    # A stop has to be quick; the resumed run evaluates first.
    seconds = 0.0 if agreed.stop else _evaluate(loop, reporter)
    # A checkpoint with a suspicious loss could displace the last good one.
    save = (due or agreed.save) and not progress.watch.suspicious
    name = _save(loop, reporter, must=agreed.stop) if agreed.stop or save else ""
    if agreed.stop:
        reporter.stop(name)
    return seconds


def _prune(loop: Loop) -> None:
    """Remove old checkpoints, unless the newest one may be worthless."""
    context = loop.context
    if context.ranks.first and not loop.progress.watch.suspicious:
        prune(context.output, context.options.keep_checkpoints)


def _save(loop: Loop, reporter: StepReporter, *, must: bool) -> str:
    """Save a checkpoint and return its name.

    If that fails, training continues without it, unless the run ``must`` stop now.
    """
    context, progress = loop.context, loop.progress
    begin = time.perf_counter()
    reporter.metrics.flush()
    try:
        loop.kept = save_checkpoint(context.output, loop.checkpoint, loop.state, context.ranks)
    except CheckpointError as error:
        if must:
            raise
        loop.timer.saved(time.perf_counter() - begin)
        context.events.note(f"warning: {error.message}; training continues without it")
        return ""
    _prune(loop)
    took = time.perf_counter() - begin
    loop.timer.saved(took)
    context.events.emit("checkpoint", step=progress.step, name=loop.kept, seconds=round(took, 3))
    return loop.kept
