"""Answer spans: the best one of every window and of every question, from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...data.tokens import Ints, Longs
from .features import Features

MAX_ANSWER_TOKENS = 30
"""Longer answers are not considered, as in BERT's recipe for SQuAD."""

Floats = NDArray[np.float32]


class Spans(NamedTuple):
    """Windows' best answers: characters ``begin`` to ``end`` of the passage, shape (windows,).

    ``score`` is the sum of both logits, or -inf for a window without a passage or a number.
    """

    score: Floats
    begin: Ints
    end: Ints

    @classmethod
    def join(cls, parts: Sequence[Spans]) -> Spans:
        """Return the parts' windows, one part after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def take(self, chosen: Longs) -> Spans:
        """Return some of them, by their indices."""
        return Spans(self.score[chosen], self.begin[chosen], self.end[chosen])


def best_spans(start: Floats, end: Floats, features: Features) -> Spans:
    """Return the best answer inside each window, from logits of shape (windows, tokens).

    It is the best of all spans of up to MAX_ANSWER_TOKENS, not only of the n best starts and ends; the
    first of equal ones. A row's result does not depend on the rest of its batch.
    """
    first, last, score = best_tokens(*(within(side, features) for side in (start, end)))
    windows, offsets = features.windows, features.encoded.passages.offsets
    found = score > -np.inf
    # Without an answer, any token will do; there may be none at all.
    places = [np.where(found, windows.first + side - windows.front, 0) for side in (first, last)]
    if not len(offsets):
        offsets = np.zeros((1, 2), dtype=np.int32)
    begin, stop = offsets[places[0], 0] * found, offsets[places[1], 1] * found
    return Spans(np.where(found, score, -np.inf).astype(np.float32), begin, stop)


def within(logits: Floats, features: Features) -> Floats:
    """Return the logits with -inf at all tokens outside the passage."""
    column = np.arange(logits.shape[1])
    front, width = features.windows.front[:, None], features.windows.width[:, None]
    inside = (column >= front) & (column < front + width) & ~np.isnan(logits)
    return np.where(inside, logits, np.float32(-np.inf))


def best_tokens(start: Floats, end: Floats) -> tuple[Longs, Longs, Floats]:
    """Return every row's best first and last token, and their score; -inf excludes a token."""
    rows = np.arange(len(start))
    # For every start, the best end in reach: six passes over the batch, not thirty.
    reach = _sliding_maximum(end, MAX_ANSWER_TOKENS)
    first = (start + reach).argmax(axis=1)
    ends = first[:, None] + np.arange(MAX_ANSWER_TOKENS)
    near = np.where(
        ends < end.shape[1], end[rows[:, None], np.minimum(ends, end.shape[1] - 1)], -np.inf
    )
    last = first + near.argmax(axis=1)
    return first, last, start[rows, first] + end[rows, last]


def _sliding_maximum(values: Floats, width: int) -> Floats:
    """Return the maximum of each value and up to ``width - 1`` values after it in its row."""
    best, reach = values, 1
    while reach < width:
        # Windows may overlap: the last pass adds what is left of the width.
        step = min(reach, width - reach)
        longer = best.copy()
        np.maximum(best[:, :-step], best[:, step:], out=longer[:, :-step])
        best, reach = longer, reach + step
    return best


def best_per_question(spans: Spans, owner: Longs, questions: int) -> Longs:
    """Return every question's best window, shape (questions,); -1 for no answer.

    Of equally good windows, it is the first, whatever the order in which they were computed.
    """
    best = np.full(questions, -1, dtype=np.int64)
    # From worst to best, later windows first: the last assignment stays.
    order = np.lexsort((-np.arange(len(owner)), spans.score))
    order = order[spans.score[order] > -np.inf]
    best[owner[order]] = order
    return best
