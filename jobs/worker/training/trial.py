"""A trial of a run's speed, for `--tune placement`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ..fast.compilation import count_compiled
from ..runtime.steps import how_many
from .batches import Indices, Schedule, TrainingRun, batches, steps_per_epoch
from .optimizer_step import prepare, take_step
from .options import TrainOptions

WARM_UPS, COMPILED_WARM_UPS = 2, 6
"""Untimed steps, in which oneDNN prepares kernels, DDP buckets, and oneCCL threads; more if layers are
compiled, because each shape of batch compiles."""
GAUGED = 2
"""Steps whose duration determines how many steps are measured."""
_FEWEST, _MOST = 5, 2000
_STEPS_OF_RECORDS = 50

Record = TypeVar("Record")


class TrialSpeed(NamedTuple):
    """The speed of all ranks, in samples per second, without the warm-up."""

    samples_per_second: float
    steps: int
    seconds: float


def enough_for_trial(
    options: TrainOptions, records: Sequence[Record], ranks: int
) -> Sequence[Record]:
    """Return all records or, for a trial, a random part: tokenizing all of SQuAD would take too long."""
    wanted = _STEPS_OF_RECORDS * options.batch_size * ranks
    if options.trial_seconds is None or len(records) <= wanted:
        return records
    return random.Random(options.seed).sample(records, wanted)


def measure_speed(run: TrainingRun, seconds: float, records: int) -> TrialSpeed:
    """Train for about ``seconds`` on all ranks and return the speed; the model is useless afterward.

    It measures at most ``--max-steps`` steps. Layers are compiled if they would be in the real run, with
    all of its ``records``.
    """
    context, samples = run.context, run.samples
    options, ranks = context.options, context.ranks
    steps = options.max_steps or options.epochs * steps_per_epoch(
        records, options.batch_size, ranks.size
    )
    model, optimizer = prepare(run, steps)
    warm_ups = COMPILED_WARM_UPS if count_compiled(run.loaded.model) else WARM_UPS

    def take(steps: Iterable[Indices]) -> tuple[int, float]:
        count, begin = 0, time.perf_counter()
        for chosen in steps:
            take_step(run, model, optimizer, run.batch(chosen))
            count += len(chosen)
        return count, time.perf_counter() - begin

    per_epoch = steps_per_epoch(len(samples), options.batch_size, ranks.size)
    take(batches(context, run.lengths, Schedule(per_epoch, warm_ups, 0)))
    _, taken = take(batches(context, run.lengths, Schedule(per_epoch, GAUGED, 0)))
    # All ranks must agree on the number, or some would wait forever.
    most = options.max_steps or _MOST
    steps = ranks.share(how_many(seconds, taken / GAUGED, min(_FEWEST, most), most))
    chosen, schedule = plan_measure(len(samples), options, ranks.size, steps)
    part = batches(context, run.lengths[chosen], schedule)
    count, taken = take(chosen[batch] for batch in part)
    return TrialSpeed(round(count / taken, 3), schedule.total, round(taken, 3))


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
