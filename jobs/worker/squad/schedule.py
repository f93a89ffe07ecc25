"""The steps of a run: how many, how fast the rate rises and falls, and on which features each is.

:mod:`.loop` takes one after another, :mod:`.step` is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..runtime.context import RankContext
from .batches import epoch_batches, steps_per_epoch
from .features import Feature, lengths
from .options import TrainOptions


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


def batches(
    context: RankContext[TrainOptions], features: Sequence[Feature], schedule: Schedule
) -> Iterator[list[Feature]]:
    """This rank's batches, epoch after epoch, as many as the schedule has steps."""
    options, ranks = context.options, context.ranks
    sizes = lengths(features)
    for first in range(0, schedule.total, schedule.per_epoch):
        seed = (options.seed, first)
        epoch = epoch_batches(sizes, options.batch_size, ranks.rank, ranks.size, seed)
        for batch in epoch[: schedule.total - first]:
            yield [features[index] for index in batch]
