"""Answers of a trained model to single questions, from the best span of all windows of their context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...runtime.precision import autocast, choose_precision, read_cpu_flags
from ...training.evaluation import plan_batches
from ...training.model import longest_input
from ...training.task import Loaded
from .answers import run_windows
from .dataset import Answer, Question, read_text
from .features import Features, build_features
from .spans import Spans, best_per_question, best_spans, within

MAX_LENGTH, STRIDE = 384, 128
"""Tokens of a window and of the overlap of two, as in training; fewer if the model takes fewer."""


class PredictedAnswer(NamedTuple):
    """A span of the question's context, or ""; ``start`` counts characters.

    ``score`` is the model's probability, 0 to 1, that the answer has this first and last word, among all
    words of the context, however it was cut into windows.
    """

    text: str
    score: float
    start: int


def ask(
    loaded: Loaded, questions: Sequence[Question], dtype: str = "auto"
) -> list[PredictedAnswer]:
    """Return a loaded model's answers, computed in ``dtype``; the questions' own are ignored."""
    if not questions:
        return []
    dtype = choose_precision(dtype, {"this machine": read_cpu_flags()}).dtype
    size = min(MAX_LENGTH, longest_input(loaded) or MAX_LENGTH)
    features = build_features(questions, loaded.tokenizer, size, min(STRIDE, size // 3))
    owner = features.windows.question
    # Sums over all windows of a question, to normalize its spans' probabilities.
    starts, ends = np.full((2, len(questions)), -np.inf)
    found, order = [], []
    for batch in run_windows(loaded, features, plan_batches(features.lengths), autocast(dtype)):
        chosen = features.take(batch.chosen)
        found.append(best_spans(batch.start, batch.end, chosen))
        order.append(batch.chosen)
        for total, logits in ((starts, batch.start), (ends, batch.end)):
            np.logaddexp.at(total, owner[batch.chosen], _log_sum(logits, chosen))
    spans = Spans.join(found).take(np.argsort(np.concatenate(order)))
    best = best_per_question(spans, owner, len(questions))
    return [
        PredictedAnswer(
            question.context[spans.begin[window] : spans.end[window]],
            float(np.exp(min(0.0, spans.score[window] - starts[number] - ends[number]))),
            int(spans.begin[window]),
        )
        if window >= 0
        else PredictedAnswer("", 0.0, 0)
        for number, (question, window) in enumerate(zip(questions, best, strict=True))
    ]


def _log_sum(logits: Any, features: Features) -> Any:
    return np.logaddexp.reduce(within(logits, features).astype(np.float64), axis=1)


def parse_question(place: str, record: Any) -> Question:
    """Return a row as a question. Raises :class:`DatasetError`, beginning with its place."""
    text, context = (read_text(place, record, key) for key in ("question", "context"))
    return Question(place, text, context, (Answer("", 0),))
