"""The schedule of a run: number of steps, learning rate, and each step's samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..data.tokens import Ints
from .batches import Indices, global_batches, steps_per_epoch
from .options import TrainOptions
from .state import TrainContext


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of one run, the same number on every rank."""

    per_epoch: int
    total: int
    warmup: int

    def rate(self, step: int) -> float:
        """Return the share of the peak learning rate for a step (from 0); always above 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return max(self.total - step, 1) / (self.total - self.warmup)


def plan_schedule(options: TrainOptions, samples: int, ranks: int) -> Schedule:
    """Return the schedule of a run."""
    per_epoch = steps_per_epoch(samples, options.batch_size, ranks)
    total = per_epoch * options.epochs
    if options.max_steps is not None:
        total = min(total, options.max_steps)
    # At most total - 1: the last step must not divide by zero.
    return Schedule(per_epoch, total, min(math.ceil(total * options.warmup_ratio), total - 1))


def batches(context: TrainContext, lengths: Ints, schedule: Schedule) -> Iterator[Indices]:
    """Yield all ranks' samples of each step of the schedule, as indices.

    With fewer ranks than planned, they share the same samples per step among them.
    """
    options, ranks = context.options, context.ranks
    for first in range(0, schedule.total, schedule.per_epoch):
        seed = (options.seed, first)
        epoch = global_batches(lengths, options.batch_size, ranks.planned, seed)
        yield from epoch[: schedule.total - first]
