"""Speed trial: measures in seconds how fast a training would run, for `spr-cluster tune`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .batches import collate, label, steps_per_epoch
from .dataset import Question
from .features import Feature
from .model import Loaded
from .optimizer_step import prepare, take_step
from .options import TrainOptions
from .schedule import Schedule, batches
from .state import TrainContext

WARM_UPS = 2
"""Untimed steps, in which oneDNN prepares kernels, DDP buckets, and oneCCL threads."""
GAUGED = 2
"""Steps whose time decides how many steps are measured."""
_FEWEST, _MOST = 5, 2000
_STEPS_OF_QUESTIONS = 50


class TrialSpeed(NamedTuple):
    """The speed of all ranks, in features per second, without the warm-up.

    ``gradient_bytes`` are those that a rank sends per step; 0 for a single rank.
    """

    samples_per_second: float
    steps: int
    seconds: float
    gradient_bytes: int


def enough_for_trial(
    options: TrainOptions, questions: list[Question], ranks: int
) -> list[Question]:
    """Return all questions, or for a trial a random part: tokenizing SQuAD takes longer than it."""
    wanted = _STEPS_OF_QUESTIONS * options.batch_size * ranks
    if options.trial_seconds is None or len(questions) <= wanted:
        return questions
    return random.Random(options.seed).sample(questions, wanted)


def measure(
    context: TrainContext, loaded: Loaded, features: Sequence[Feature], seconds: float
) -> TrialSpeed:
    """Train for about ``seconds`` on all ranks and return the speed; the model becomes useless."""
    options, ranks = context.options, context.ranks
    # 0 steps: automatic compilation would take longer than the trial.
    model, optimizer = prepare(context, loaded, steps=0)

    def take(chosen: Sequence[Feature], schedule: Schedule) -> tuple[int, float]:
        samples, begin = 0, time.perf_counter()
        for batch in batches(context, chosen, schedule):
            tensors = collate(batch, loaded.pad_token) | label(batch)
            take_step(context, model, optimizer, tensors)
            samples += len(batch) * ranks.size
        return samples, time.perf_counter() - begin

    per_epoch = steps_per_epoch(len(features), options.batch_size, ranks.size)
    take(features, Schedule(per_epoch, WARM_UPS, 0))
    _, taken = take(features, Schedule(per_epoch, GAUGED, 0))
    # The same number on all ranks, or some would wait forever.
    steps: int = ranks.share(choose_steps(seconds, taken / GAUGED))
    chosen, schedule = plan_measure(features, options, ranks.size, steps)
    before = _sent_bytes(model)
    samples, taken = take(chosen, schedule)
    sent = (_sent_bytes(model) - before) // schedule.total
    return TrialSpeed(round(samples / taken, 3), schedule.total, round(taken, 3), sent)


def _sent_bytes(model: Any) -> int:
    return int(getattr(model, "sent_bytes", 0))


def choose_steps(seconds: float, one: float) -> int:
    """Return how many steps of ``one`` second fit into the time, within bounds."""
    return max(_FEWEST, min(_MOST, int(seconds / max(one, 1e-6))))


def plan_measure(
    features: Sequence[Feature], options: TrainOptions, ranks: int, steps: int
) -> tuple[Sequence[Feature], Schedule]:
    """Return features and a schedule of whole epochs, with about ``steps`` steps.

    Batches have features of similar length: with parts of epochs, a trial might be faster only because
    its texts were shorter.
    """
    per_epoch = steps_per_epoch(len(features), options.batch_size, ranks)
    if steps >= per_epoch:
        return features, Schedule(per_epoch, -(-steps // per_epoch) * per_epoch, 0)
    wanted = steps * options.batch_size * ranks
    return random.Random(options.seed).sample(list(features), wanted), Schedule(steps, steps, 0)
