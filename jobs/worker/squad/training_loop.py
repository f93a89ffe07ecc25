"""Training from its first step, or from a checkpoint, to its last: what a person can trust.

The same steps follow whether a run is interrupted or not, bit for bit, on as many ranks: the batches
and rates follow from the step's number, everything else is in the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch

from ..runtime.context import RankContext
from ..runtime.errors import CheckpointError, TrainingError
from ..runtime.metrics import StepFigures
from ..runtime.steps import StepReporter
from .batches import collate, label
from .checkpoints import (
    Checkpoint,
    CheckpointTimer,
    identify,
    list_checkpoints,
    load_state,
    prune,
    read_checkpoint,
    require_same,
    save_checkpoint,
)
from .compilation import count_compiled, plain_layers
from .features import Feature
from .model import Loaded
from .optimizer_step import Step, prepare, take_step
from .options import TrainOptions
from .schedule import Schedule, batches, plan_schedule
from .state import State, TrainingProgress

CURVE_POINTS = 500
"""About so many points of the loss curve are kept, whatever the number of steps."""


@dataclass
class Loop:
    """One rank's training, between two of its steps."""

    context: RankContext[TrainOptions]
    schedule: Schedule
    state: State
    trained: Any
    """The model as all ranks train it together."""
    checkpoint: Checkpoint
    timer: CheckpointTimer
    highest_rate: float
    kept: str = ""
    """The newest checkpoint's name; the same on every rank."""

    @property
    def progress(self) -> TrainingProgress:
        return self.checkpoint.progress


def train(
    context: RankContext[TrainOptions], loaded: Loaded, features: Sequence[Feature]
) -> TrainingProgress:
    """Train the loaded model in place on all ranks.

    Raises :class:`TrainingError` where the loss goes astray, :class:`CheckpointError` where a run
    can't be resumed, and :class:`StoppedError` after a SIGTERM.
    """
    options, ranks = context.options, context.ranks
    schedule = plan_schedule(options, len(features), ranks.size)
    torch.manual_seed(options.seed + ranks.rank)  # each rank drops out other units
    trained, optimizer = prepare(context, loaded, schedule.total)
    ground = {
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "backend": ranks.backend,
        "threads per rank": str(torch.get_num_threads()),
        "compiled layers": str(count_compiled(loaded.model)),
    }
    identity = identify(options, ranks, context.precision.dtype, features, ground)
    loop = Loop(
        context,
        schedule,
        State(loaded.model, optimizer),
        trained,
        Checkpoint(identity, TrainingProgress()),
        CheckpointTimer(options.checkpoint_every),
        optimizer.param_groups[0]["lr"],
    )
    if options.resume:
        _resume(loop, loaded, features)
    _take_steps(loop, loaded, features)
    plain_layers(loaded.model)
    return loop.progress


def _resume(loop: Loop, loaded: Loaded, features: Sequence[Feature]) -> None:
    """Go back to the newest checkpoint that rank 0 has; without one, training begins anew."""
    context, ranks = loop.context, loop.context.ranks
    found = list_checkpoints(loop.context.output) if ranks.first else []
    newest = found[-1] if found else None
    saved = read_checkpoint(newest) if newest else None
    told = require_same(saved.identity, loop.checkpoint.identity) if saved else []
    saved = ranks.share(saved)
    if saved is None:
        context.events.note(f"no checkpoint in {loop.context.output}: training begins anew")
        return
    _warm_up(loop, loaded, features)
    load_state(newest, loop.state, ranks)
    loop.checkpoint = Checkpoint(loop.checkpoint.identity, saved.progress)
    progress = loop.progress
    if progress.step > loop.schedule.total:
        raise CheckpointError(
            f"step {progress.step} was done, and the run would have {loop.schedule.total} steps only",
            hint="resume with as many --epochs or --max-steps as it began with, or more",
        )
    progress.resumed.append((progress.step, progress.seconds))
    loop.kept = ranks.share(newest.name if newest else "")
    context.events.emit("resumed", step=progress.step, total=loop.schedule.total)
    if told:
        context.events.note(f"resumed with {', '.join(told)}: no longer the same run")


def _warm_up(loop: Loop, loaded: Loaded, features: Sequence[Feature]) -> None:
    """Take a step that counts for nothing.

    After its first step DDP arranges the gradients anew, and how they are arranged decides the last
    bit of a sum over three ranks or more.
    """
    batch = next(iter(batches(loop.context, features, loop.schedule)))
    tensors = collate(batch, loaded.pad_token) | label(batch)
    take_step(loop.context, loop.trained, loop.state.optimizer, tensors)


def _take_steps(loop: Loop, loaded: Loaded, features: Sequence[Feature]) -> None:
    context, schedule, progress = loop.context, loop.schedule, loop.progress
    reporter = context.report_steps(schedule.total, schedule.per_epoch)
    reporter.done, reporter.samples, reporter.tokens = (
        progress.step,
        progress.samples,
        progress.tokens,
    )
    # Skipped rather than computed from another place: the same batches by construction.
    rest = islice(batches(context, features, schedule), progress.step, None)
    with reporter:
        begin = time.perf_counter() - progress.seconds
        ended = time.perf_counter()
        for number, batch in enumerate(rest, start=progress.step + 1):
            rate = _set_rate(loop, number)
            tensors = collate(batch, loaded.pad_token) | label(batch)
            fetched = time.perf_counter()
            step = take_step(context, loop.trained, loop.state.optimizer, tensors)
            seconds = {"data": fetched - ended, **step.seconds}
            ended = time.perf_counter()
            progress.step, progress.seconds = number, ended - begin
            figures = StepFigures(
                number,
                progress.seconds,
                step.loss,
                rate,
                len(batch),
                sum(map(len, batch)),
                tensors["input_ids"].numel(),
                seconds,
            )
            _judge(loop, step)
            _after_step(loop, reporter, figures)
            ended = time.perf_counter()  # the time of a checkpoint is not that of data


def _set_rate(loop: Loop, number: int) -> float:
    """Give the optimizer the learning rate of the step (from 1), and return it."""
    rate: float = loop.highest_rate * loop.schedule.rate(number - 1)
    for group in loop.state.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _judge(loop: Loop, step: Step) -> None:
    """Take the loss down; raises :class:`TrainingError` where it shows that learning went wrong."""
    progress, total = loop.progress, loop.schedule.total
    if not math.isfinite(step.loss):
        raise TrainingError(
            f"the loss or its gradient became infinite at step {progress.step} of {total}",
            hint="lower --learning-rate, or use --dtype fp32" + _way_back(loop),
        )
    watch = progress.watch
    watch.see(step.loss)
    if watch.diverged:
        raise TrainingError(
            f"the loss diverged: at step {progress.step} of {total} it is about {watch.level:.2f}, "
            f"after {watch.best:.2f} at its best",
            hint="lower --learning-rate, or raise --warmup-ratio" + _way_back(loop),
        )
    every = -(-total // CURVE_POINTS)
    if progress.step % every == 0 or progress.step == total:
        progress.curve.append((progress.step, round(step.loss, 5)))


def _way_back(loop: Loop) -> str:
    return f", with --resume from {loop.kept}, which is kept" if loop.kept else ""


def _after_step(loop: Loop, reporter: StepReporter, figures: StepFigures) -> None:
    """Report the step; then save a checkpoint or stop, if all ranks agree."""
    progress, last = loop.progress, figures.step == loop.schedule.total
    due = loop.timer.by_step(figures.step, last=last)
    busy = sum(figures.seconds.values()) - figures.seconds.get("communication", 0.0)
    agreed = reporter.take(figures, busy, talk=due, save=loop.timer.by_time(last=last))
    progress.samples, progress.tokens = reporter.samples, reporter.tokens
    # One that is saved while the loss is astray would in time displace the last good one.
    save = (due or agreed.save) and not progress.watch.suspicious
    name = _save(loop, reporter, must=agreed.stop) if agreed.stop or save else ""
    if agreed.stop:
        reporter.stop(name)


def _save(loop: Loop, reporter: StepReporter, *, must: bool) -> str:
    """Keep a checkpoint and return its name.

    A disk that does not take it is no reason to end what goes well, unless the run ``must`` end now.
    """
    context, progress = loop.context, loop.progress
    begin = time.perf_counter()
    reporter.metrics.flush()
    try:
        loop.kept = save_checkpoint(loop.context.output, loop.checkpoint, loop.state, context.ranks)
    except CheckpointError as error:
        if must:
            raise
        loop.timer.saved(time.perf_counter() - begin)
        context.events.note(f"warning: {error.message}; training goes on without it")
        return ""
    if context.ranks.first and not progress.watch.suspicious:
        prune(loop.context.output, context.options.keep_checkpoints)
    took = time.perf_counter() - begin
    loop.timer.saved(took)
    context.events.emit("checkpoint", step=progress.step, name=loop.kept, seconds=round(took, 3))
    return loop.kept
