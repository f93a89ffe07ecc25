"""Answers from logits: the best span of every window and every question, for evaluation and `predict`.

Models of data with unanswerable questions (SQuAD v2.0) mark the first token for no answer. That is what they
answer if its score is higher than the best span's by more than the threshold in their configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...data.tokens import Longs
from ...runtime.precision import autocast, choose_here
from ...training.evaluation import compute_together, in_order, plan_batches, run_batches
from ...training.model import longest_input
from ...training.state import TrainContext
from ...training.task import Loaded
from .dataset import Question, read_text
from .features import Features, build_features
from .metrics import LONGEST_ANSWER, THRESHOLD, WINDOW, Answers

MAX_ANSWER_TOKENS = 30
"""Longer answers are not considered, as in BERT's recipe, unless the model's configuration says so."""
MAX_LENGTH, STRIDE = 384, 128
"""Tokens of a window and of the overlap, unless the model's configuration says which training had."""

NO_SPAN = float(np.finfo(np.float32).max)
"""Null odds of a question without any span: above any threshold, and JSON has no infinity."""

Floats = NDArray[np.float32]
Spans = NDArray[Any]
"""Windows' best answers, with the fields of :data:`SPAN`."""
SPAN = np.dtype([("score", "f4"), ("begin", "i4"), ("end", "i4"), ("null", "f4")])
"""Characters ``begin`` to ``end`` of the passage; ``score`` is the sum of both logits, or -inf for a window
without a passage or a number; ``null`` is the sum of the first token's logits, the score of no answer."""


def best_spans(
    start: Floats, end: Floats, features: Features, longest: int = MAX_ANSWER_TOKENS
) -> Spans:
    """Return the best answer inside each window, from logits of shape (windows, tokens).

    It is the first of the best among all spans of up to ``longest`` tokens, not only among the n best starts
    and ends. A row's result does not depend on the rest of its batch.
    """
    first, last, score = best_tokens(within(start, features), within(end, features), longest)
    windows, offsets = features.windows, features.encoded.passages.offsets
    found = score > -np.inf
    # Without an answer, any token is fine; there may be none.
    places = [np.where(found, windows.first + side - windows.front, 0) for side in (first, last)]
    if not len(offsets):
        offsets = np.zeros((1, 2), dtype=np.int32)
    spans = np.zeros(len(start), dtype=SPAN)
    spans["begin"], spans["end"] = (offsets[places[n], n] * found for n in (0, 1))
    spans["score"] = np.where(found, score, -np.inf)
    spans["null"] = start[:, 0] + end[:, 0]
    return spans


def within(logits: Floats, features: Features) -> Floats:
    """Return the logits with -inf at all tokens outside the passage."""
    column = np.arange(logits.shape[1])
    front, width = features.windows.front[:, None], features.windows.width[:, None]
    inside = (column >= front) & (column < front + width) & ~np.isnan(logits)
    return np.where(inside, logits, np.float32(-np.inf))


def best_tokens(start: Floats, end: Floats, longest: int) -> tuple[Longs, Longs, Floats]:
    """Return every row's best first and last token, and their score; -inf excludes a token."""
    rows, more = np.arange(len(start)), min(longest, end.shape[1]) - 1
    padded = np.pad(end, ((0, 0), (0, more)), constant_values=-np.inf)
    ends = sliding_window_view(padded, more + 1, axis=1)  # of each start
    first = (start + ends.max(axis=2)).argmax(axis=1)
    last = first + ends[rows, first].argmax(axis=1)
    return first, last, start[rows, first] + end[rows, last]


def best_per_question(spans: Spans, owner: Longs, questions: int) -> Longs:
    """Return every question's best window, shape (questions,); -1 for no answer.

    Among equally good windows, it is the first, regardless of the order of computation.
    """
    best = np.full(questions, -1, dtype=np.int64)
    # From worst to best, later windows first: the last assignment wins.
    order = np.lexsort((-np.arange(len(owner)), spans["score"]))
    order = order[spans["score"][order] > -np.inf]
    best[owner[order]] = order
    return best


def null_odds(spans: Spans, owner: Longs, best: Longs) -> Floats:
    """Return every question's score of no answer minus that of its best window, shape (questions,).

    The former is the minimum over its windows: an answer in one of them is enough.
    """
    null = np.full(len(best), np.inf, dtype=np.float32)
    np.fmin.at(null, owner, spans["null"])
    odds = np.full(len(best), NO_SPAN, dtype=np.float32)
    found = best >= 0
    odds[found] = null[found] - spans["score"][best[found]]
    return np.where(np.isfinite(odds), odds, np.float32(NO_SPAN))


def predict(
    context: TrainContext, loaded: Loaded, questions: Sequence[Question], features: Features
) -> Answers:
    """Return the best span for every question on all ranks.

    A question that was skipped (see ``--skip-bad-records``) has the answer "".
    """

    def find_spans(batches: Sequence[Longs]) -> Iterator[tuple[Longs, Spans]]:
        for chosen, spans, _ in run_windows(loaded, features, batches, context.autocast()):
            yield chosen, spans

    spans: Spans = in_order(compute_together(context.ranks, features.lengths, find_spans))
    owner = features.windows.question
    best = best_per_question(spans, owner, len(questions))
    texts = {
        question.id: _cut(question, spans[window]) if window >= 0 else ""
        for question, window in zip(questions, best, strict=True)
    }
    return Answers(texts, dict(zip(texts, null_odds(spans, owner, best).tolist(), strict=True)))


def _cut(question: Question, span: Any) -> str:
    return question.context[span["begin"] : span["end"]]


def run_windows(
    loaded: Loaded,
    features: Features,
    batches: Sequence[Longs],
    autocast: AbstractContextManager[Any],
) -> Iterator[tuple[Longs, Spans, tuple[Floats, Floats]]]:
    """Yield each batch's windows with their best spans, and the model's logits within the passages."""
    longest = int(getattr(loaded.model.config, LONGEST_ANSWER, MAX_ANSWER_TOKENS))
    for chosen, output in run_batches(loaded, features, batches, autocast):
        windows = features.take(chosen)
        start, end = output.start_logits.float().numpy(), output.end_logits.float().numpy()
        spans = best_spans(start, end, windows, longest)
        yield chosen, spans, (within(start, windows), within(end, windows))


class PredictedAnswer(NamedTuple):
    """A span of the question's context, or ""; ``start`` counts characters.

    ``score`` is the model's probability, 0 to 1, of this first and last word among all words of the context,
    independent of the windows. ``null_odds`` are those of :class:`.metrics.Answers`, if the model has a
    threshold for them.
    """

    text: str
    score: float
    start: int
    null_odds: float | None = None


def ask(loaded: Loaded, questions: Sequence[Question]) -> list[PredictedAnswer]:
    """Return a loaded model's answers; the questions' own are ignored."""
    if not questions:
        return []
    size = min(MAX_LENGTH, longest_input(loaded) or MAX_LENGTH)
    size, stride = getattr(loaded.model.config, WINDOW, (size, min(STRIDE, size // 3)))
    features = build_features(questions, loaded.tokenizer, size, stride)
    owner = features.windows.question
    # Sums over all windows of a question, to normalize its spans' probabilities.
    starts, ends = np.full((2, len(questions)), -np.inf)
    found = []
    batches = plan_batches(features.lengths, fewest=1)  # no other ranks share them
    for chosen, part, logits in run_windows(loaded, features, batches, autocast(choose_here())):
        found.append((chosen, part))
        for total, inside in zip((starts, ends), logits, strict=True):
            sums = np.logaddexp.reduce(inside.astype(np.float64), axis=1)
            np.logaddexp.at(total, owner[chosen], sums)
    spans: Spans = in_order(found)
    best = best_per_question(spans, owner, len(questions))
    threshold = getattr(loaded.model.config, THRESHOLD, None)
    odds = [None] * len(best) if threshold is None else null_odds(spans, owner, best).tolist()
    return [
        PredictedAnswer(
            _cut(question, spans[window]),
            float(np.exp(min(0.0, spans["score"][window] - starts[number] - ends[number]))),
            int(spans["begin"][window]),
            null,
        )
        if window >= 0 and (null is None or null <= threshold)
        else PredictedAnswer("", 0.0, 0, null)
        for number, (question, window, null) in enumerate(zip(questions, best, odds, strict=True))
    ]


def parse_question(place: str, record: Any) -> Question:
    """Return a row as a question. Raises :class:`DatasetError`, beginning with its place."""
    text, context = (read_text(place, record, key) for key in ("question", "context"))
    return Question(place, text, context, ())
