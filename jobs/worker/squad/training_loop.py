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
from pathlib import Path
from typing import Any

from ..runtime.errors import CheckpointError, StoppedError, TrainingError
from ..runtime.metrics import Metrics, StepFigures
from ..runtime.stopping import Wish, listen
from .batches import collate, label
from .checkpoints import (
    Checkpoint,
    identify,
    list_checkpoints,
    load_state,
    prune,
    read_checkpoint,
    require_same,
    save_checkpoint,
)
from .compilation import count_compiled, plain_layers
from .due import Due
from .features import Feature
from .model import Loaded
from .optimizer_step import Step, prepare, take_step
from .pace import Pace
from .progress import Progress
from .schedule import Schedule, batches, plan_schedule
from .session import Session
from .state import State

CURVE_POINTS = 500
"""About so many points of the loss curve are kept, whatever the number of steps."""


@dataclass
class Loop:
    """One rank's training, between two of its steps."""

    session: Session
    schedule: Schedule
    state: State
    trained: Any
    """The model as all ranks train it together."""
    checkpoint: Checkpoint
    metrics: Metrics
    pace: Pace
    due: Due
    highest_rate: float
    kept: str = ""
    """The newest checkpoint's name; the same on every rank."""

    @property
    def progress(self) -> Progress:
        return self.checkpoint.progress

    @property
    def output(self) -> Path:
        return Path(self.session.options.output)


def train(session: Session, loaded: Loaded, features: Sequence[Feature]) -> Progress:
    """Train the loaded model in place on all ranks.

    Raises :class:`TrainingError` where the loss goes astray, :class:`CheckpointError` where a run
    can't be resumed, and :class:`StoppedError` after a SIGTERM.
    """
    import torch

    options, ranks = session.options, session.ranks
    schedule = plan_schedule(options, len(features), ranks.size)
    torch.manual_seed(options.seed + ranks.rank)  # each rank drops out other units
    trained, optimizer = prepare(session, loaded, schedule.total)
    ground = {
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "backend": ranks.backend,
        "threads per rank": str(torch.get_num_threads()),
        "compiled layers": str(count_compiled(loaded.model)),
    }
    identity = identify(options, ranks, session.precision.dtype, features, ground)
    loop = Loop(
        session,
        schedule,
        State(loaded.model, optimizer),
        trained,
        Checkpoint(identity, Progress()),
        Metrics(Path(options.output), ranks.rank, session.events.note),
        Pace(ranks, session.hosts),
        Due(options.checkpoint_every),
        optimizer.param_groups[0]["lr"],
    )
    if options.resume:
        _resume(loop, loaded, features)
    with listen() as wish, loop.metrics:
        _take_steps(loop, wish, loaded, features)
    plain_layers(loaded.model)
    return loop.progress


def _resume(loop: Loop, loaded: Loaded, features: Sequence[Feature]) -> None:
    """Go back to the newest checkpoint that rank 0 has; without one, training begins anew."""
    session, ranks = loop.session, loop.session.ranks
    found = list_checkpoints(loop.output) if ranks.first else []
    newest = found[-1] if found else None
    saved = read_checkpoint(newest) if newest else None
    told = require_same(saved.identity, loop.checkpoint.identity) if saved else []
    saved = ranks.share(saved)
    if saved is None:
        session.events.note(f"no checkpoint in {loop.output}: training begins anew")
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
    session.events.emit("resumed", step=progress.step, total=loop.schedule.total)
    if told:
        session.events.note(f"resumed with {', '.join(told)}: no longer the same run")


def _warm_up(loop: Loop, loaded: Loaded, features: Sequence[Feature]) -> None:
    """Take a step that counts for nothing.

    After its first step DDP arranges the gradients anew, and how they are arranged decides the last
    bit of a sum over three ranks or more.
    """
    batch = next(iter(batches(loop.session, features, loop.schedule)))
    tensors = collate(batch, loaded.pad_token) | label(batch)
    take_step(loop.session, loop.trained, loop.state.optimizer, tensors)


def _take_steps(loop: Loop, wish: Wish, loaded: Loaded, features: Sequence[Feature]) -> None:
    session, schedule, progress = loop.session, loop.schedule, loop.progress
    loop.metrics.begin(progress.step)
    loop.pace.begin(progress.step, progress.samples, progress.tokens)
    begin = time.perf_counter() - progress.seconds
    ended = time.perf_counter()
    # Skipped rather than computed from another place: the same batches by construction.
    rest = islice(batches(session, features, schedule), progress.step, None)
    for number, batch in enumerate(rest, start=progress.step + 1):
        rate = _set_rate(loop, number)
        tensors = collate(batch, loaded.pad_token) | label(batch)
        fetched = time.perf_counter()
        step = take_step(session, loop.trained, loop.state.optimizer, tensors)
        seconds = {"data": fetched - ended, **step.seconds}
        ended = time.perf_counter()
        progress.step, progress.seconds = number, ended - begin
        progress.samples += len(batch) * session.ranks.size
        tokens = sum(map(len, batch))
        padded = tensors["input_ids"].numel()
        figures = StepFigures(
            number, progress.seconds, step.loss, rate, len(batch), tokens, padded, seconds
        )
        _judge(loop, step)
        loop.metrics.add(figures)
        loop.pace.count(tokens, sum(seconds.values()) - seconds.get("communication", 0.0))
        _after_step(loop, wish, step.loss, rate)
        ended = time.perf_counter()  # what a checkpoint takes is not what data take


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


def _after_step(loop: Loop, wish: Wish, loss: float, rate: float) -> None:
    """Talk with the other ranks where that is due, tell the user, keep a checkpoint, or end."""
    progress, total, pace = loop.progress, loop.schedule.total, loop.pace
    last = progress.step == total
    save, stop = loop.due.by_step(progress.step, last=last), False
    if progress.step >= pace.next_talk or last or save:
        agreed = pace.talk(progress.step, stop=wish.stop, save=loop.due.by_time(last=last))
        progress.tokens += agreed.tokens
        pace.mark(progress.step, progress.samples, progress.tokens)
        stop = agreed.stop
        save = save or agreed.save
    _tell(loop, loss, rate)
    # One that is saved while the loss is astray would in time displace the last good one.
    name = _save(loop, must=stop) if stop or (save and not progress.watch.suspicious) else ""
    if stop:
        loop.session.events.emit("stopped", step=progress.step, total=total, checkpoint=name)
        raise StoppedError(f"stopped after step {progress.step} of {total}")


def _tell(loop: Loop, loss: float, rate: float) -> None:
    progress, total = loop.progress, loop.schedule.total
    loop.session.events.step(
        progress.step,
        total,
        epoch=round(progress.step / loop.schedule.per_epoch, 3),
        loss=round(loss, 5),
        lr=rate,
        **loop.pace.speed(total)._asdict(),
        shares=loop.pace.shares,
    )


def _save(loop: Loop, *, must: bool) -> str:
    """Keep a checkpoint and return its name.

    A disk that does not take it is no reason to end what goes well, unless the run ``must`` end now.
    """
    session, progress = loop.session, loop.progress
    begin = time.perf_counter()
    loop.metrics.flush()
    try:
        loop.kept = save_checkpoint(loop.output, loop.checkpoint, loop.state, session.ranks)
    except CheckpointError as error:
        if must:
            raise
        loop.due.saved(time.perf_counter() - begin)
        session.events.note(f"warning: {error.message}; training goes on without it")
        return ""
    if session.ranks.first and not progress.watch.suspicious:
        prune(loop.output, session.options.keep_checkpoints)
    took = time.perf_counter() - begin
    loop.due.saved(took)
    session.events.emit("checkpoint", step=progress.step, name=loop.kept, seconds=round(took, 3))
    return loop.kept
