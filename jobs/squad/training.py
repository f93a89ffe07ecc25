"""Training from the first batch to the last: a rate that rises and falls linearly."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .batches import collate, epoch_batches, label, steps_per_epoch
from .compilation import plain_layers
from .errors import TrainingError
from .features import Feature, lengths
from .model import Loaded
from .options import TrainOptions
from .session import Session
from .step import prepare, take_step

CURVE_POINTS = 500
"""About so many points of the loss curve are kept, whatever the number of steps."""


@dataclass(frozen=True)
class Trained:
    """What training did; ``samples`` (features, repeated ones included) are those of all ranks.

    ``loss_curve`` holds (step, mean loss of all ranks).
    """

    loss_curve: list[tuple[int, float]]
    samples: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of one run, the same number on every rank."""

    per_epoch: int
    total: int
    warmup: int

    def rate(self, step: int) -> float:
        """The share of the highest learning rate that step (from 0) uses; never quite 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return max(self.total - step, 1) / (self.total - self.warmup)


def plan_schedule(options: TrainOptions, features: int, ranks: int) -> Schedule:
    """How many steps a run takes."""
    per_epoch = steps_per_epoch(features, options.batch_size, ranks)
    total = per_epoch * options.epochs
    if options.max_steps is not None:
        total = min(total, options.max_steps)
    # At most total - 1: after the last step the scheduler asks for one rate more.
    return Schedule(per_epoch, total, min(math.ceil(total * options.warmup_ratio), total - 1))


def train(session: Session, loaded: Loaded, features: Sequence[Feature]) -> Trained:
    """Train the loaded model in place on all ranks; raises :class:`TrainingError`."""
    import torch

    options, ranks = session.options, session.ranks
    schedule = plan_schedule(options, len(features), ranks.size)
    torch.manual_seed(options.seed + ranks.rank)  # each rank drops out other units
    model, optimizer = prepare(session, loaded.model, schedule.total)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    every = -(-schedule.total // CURVE_POINTS)
    curve: list[tuple[int, float]] = []
    samples, begin = 0, time.perf_counter()
    for step, batch in enumerate(batches(session, features, schedule), start=1):
        tensors = collate(batch, loaded.pad_token) | label(batch)
        loss = take_step(session, model, optimizer, tensors).loss
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss or its gradient became infinite at step {step} of {schedule.total}",
                hint="lower --learning-rate, or use --dtype fp32",
            )
        samples += len(batch) * ranks.size
        if step % every == 0 or step == schedule.total:
            curve.append((step, round(loss, 5)))
        session.events.step(
            step,
            schedule.total,
            epoch=round(step / schedule.per_epoch, 3),
            loss=round(loss, 5),
            lr=scheduler.get_last_lr()[0],
            samples_per_second=round(samples / (time.perf_counter() - begin), 2),
        )
        scheduler.step()
    plain_layers(loaded.model)
    return Trained(curve, samples, time.perf_counter() - begin)


def batches(
    session: Session, features: Sequence[Feature], schedule: Schedule
) -> Iterator[list[Feature]]:
    """This rank's batches, epoch after epoch, as many as the schedule has steps."""
    options, ranks = session.options, session.ranks
    sizes = lengths(features)
    for first in range(0, schedule.total, schedule.per_epoch):
        seed = (options.seed, first)
        epoch = epoch_batches(sizes, options.batch_size, ranks.rank, ranks.size, seed)
        for batch in epoch[: schedule.total - first]:
            yield [features[index] for index in batch]
