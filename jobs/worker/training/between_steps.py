"""A run between two steps: how it resumes, and what follows a step.

An interrupted run takes the same steps, bit for bit, as one without interruption: batches and rates follow
from the step's number, and everything else is in the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.errors import CheckpointError
from ..runtime.output import StepFigures
from ..runtime.steps import StepReporter
from .batches import Schedule, TrainingRun, batches
from .best import Evaluator
from .checkpoints import (
    Checkpoint,
    CheckpointTimer,
    load_state,
    newest_undamaged,
    prune,
    require_same,
    save_checkpoint,
)
from .optimizer_step import take_step
from .state import State, TrainContext, TrainingProgress


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
    fast: Sequence[str] = ()
    """The parts of the fast path that were active at the end."""

    @property
    def context(self) -> TrainContext:
        return self.run.context

    @property
    def progress(self) -> TrainingProgress:
        return self.checkpoint.progress


def resume(loop: Loop) -> None:
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


def evaluate(loop: Loop, reporter: StepReporter) -> float:
    """Evaluate the model if it is due; return the seconds, which are not training time."""
    if not loop.evaluator.is_due(loop.progress):
        return 0.0
    seconds = loop.evaluator.evaluate(loop.progress, loop.state)
    reporter.pace.pause(seconds)
    return seconds


def after_step(loop: Loop, reporter: StepReporter, figures: StepFigures) -> float:
    """Report steps; then evaluate, save a checkpoint, or stop, if all ranks agree.

    Returns the seconds of the evaluation.
    """
    progress, last = loop.progress, figures.step == loop.schedule.total
    due = loop.timer.by_step(figures.step, last=last)
    busy = sum(figures.seconds.values()) - figures.seconds.get("communication", 0.0)
    now = due or loop.evaluator.is_due(progress)
    agreed = reporter.take(figures, busy, now=now, save=loop.timer.by_time(last=last))
    progress.samples, progress.tokens = reporter.samples, reporter.tokens
    # A stop has to be quick; the resumed run evaluates first.
    seconds = 0.0 if agreed.stop else evaluate(loop, reporter)
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
