"""A model's answers to every question of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from ...data.tokens import Longs
from ...training.evaluation import compute_together, run_batches
from ...training.state import TrainContext
from ...training.task import Loaded
from .dataset import Question
from .features import Features
from .spans import Floats, Spans, best_per_question, best_spans


class Batch(NamedTuple):
    """A batch's windows, and the start and end logits of shape (windows, tokens)."""

    chosen: Longs
    start: Floats
    end: Floats


def predict(
    context: TrainContext, loaded: Loaded, questions: Sequence[Question], features: Features
) -> dict[str, str]:
    """Return the answer to every question, by its ID, on all ranks.

    A question that was skipped (see ``--skip-bad-records``) has the answer "".
    """

    def find_spans(batches: Sequence[Longs]) -> Iterator[tuple[Longs, Spans]]:
        for batch in run_windows(loaded, features, batches, context.autocast()):
            spans = best_spans(batch.start, batch.end, features.take(batch.chosen))
            yield batch.chosen, spans

    return answers(
        questions, features, compute_together(context.ranks, features.lengths, find_spans)
    )


def answers(
    questions: Sequence[Question], features: Features, parts: Sequence[tuple[Longs, Spans]]
) -> dict[str, str]:
    """Return every question's answer, from all windows' best spans in any order."""
    if not parts:
        return {question.id: "" for question in questions}
    chosen = np.concatenate([indices for indices, _ in parts])
    spans = Spans.join([spans for _, spans in parts]).take(np.argsort(chosen))
    best = best_per_question(spans, features.windows.question, len(questions))
    return {
        question.id: question.context[spans.begin[window] : spans.end[window]]
        if window >= 0
        else ""
        for question, window in zip(questions, best, strict=True)
    }


def run_windows(
    loaded: Loaded,
    features: Features,
    batches: Sequence[Longs],
    autocast: AbstractContextManager[Any],
) -> Iterator[Batch]:
    """Yield each batch with the model's logits."""
    for chosen, output in run_batches(loaded, features, batches, autocast):
        start, end = output.start_logits.float().numpy(), output.end_logits.float().numpy()
        yield Batch(chosen, start, end)
