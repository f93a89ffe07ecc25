"""From a batch's logits to the best answer of every window, and of every question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .features import Features
from .tokens import Ints, Longs

MAX_ANSWER_TOKENS = 30
"""Longer answers are not considered, as in BERT's own recipe for SQuAD."""

Floats = NDArray[np.float32]


class Spans(NamedTuple):
    """Windows' best answers: characters ``begin`` to ``end`` of the passage, shape (windows,).

    ``score`` is the sum of both logits; -inf where a window holds no passage or no number.
    """

    score: Floats
    begin: Ints
    end: Ints

    @classmethod
    def join(cls, parts: Sequence[Spans]) -> Spans:
        """The parts' windows, one part after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def take(self, chosen: Longs) -> Spans:
        """Some of them, by their indices."""
        return Spans(self.score[chosen], self.begin[chosen], self.end[chosen])


def best_spans(start: Floats, end: Floats, features: Features) -> Spans:
    """The best-scored answer inside each window, from logits of shape (windows, tokens).

    Exact: the best of all spans of up to MAX_ANSWER_TOKENS, not of the n best starts and ends. Of
    equal ones it is the first. A row's result does not depend on the batch around it.
    """
    first, last, score = best_tokens(*(within(side, features) for side in (start, end)))
    windows, offsets = features.windows, features.encoded.passages.offsets
    found = score > -np.inf
    # Where nothing is found, any token will do; there may be none at all.
    places = [np.where(found, windows.first + side - windows.front, 0) for side in (first, last)]
    if not len(offsets):
        offsets = np.zeros((1, 2), dtype=np.int32)
    begin, stop = offsets[places[0], 0] * found, offsets[places[1], 1] * found
    return Spans(np.where(found, score, -np.inf).astype(np.float32), begin, stop)


def within(logits: Floats, features: Features) -> Floats:
    """The logits with -inf at all tokens that are not the passage's."""
    column = np.arange(logits.shape[1])
    front, width = features.windows.front[:, None], features.windows.width[:, None]
    inside = (column >= front) & (column < front + width) & ~np.isnan(logits)
    return np.where(inside, logits, np.float32(-np.inf))


def best_tokens(start: Floats, end: Floats) -> tuple[Longs, Longs, Floats]:
    """Every row's best first and last token, and their score; -inf excludes a token."""
    rows = np.arange(len(start))
    # For every start the best end that is not too far: six passes over the batch, not thirty.
    reach = _sliding_maximum(end, MAX_ANSWER_TOKENS)
    first = (start + reach).argmax(axis=1)
    ends = first[:, None] + np.arange(MAX_ANSWER_TOKENS)
    near = np.where(
        ends < end.shape[1], end[rows[:, None], np.minimum(ends, end.shape[1] - 1)], -np.inf
    )
    last = first + near.argmax(axis=1)
    return first, last, start[rows, first] + end[rows, last]


def _sliding_maximum(values: Floats, width: int) -> Floats:
    """The maximum of each value and the ``width - 1`` after it in its row, as many as there are."""
    best, reach = values, 1
    while reach < width:
        # Windows may overlap: the last pass adds what is missing to the full width.
        step = min(reach, width - reach)
        longer = best.copy()
        np.maximum(best[:, :-step], best[:, step:], out=longer[:, :-step])
        best, reach = longer, reach + step
    return best


def best_per_question(spans: Spans, owner: Longs, questions: int) -> Longs:
    """Every question's best window, shape (questions,); -1 where none has an answer.

    Of equally good windows it is the first, in whatever order they were computed.
    """
    best = np.full(questions, -1, dtype=np.int64)
    # From the worst to the best, later windows first: what is written last stays.
    order = np.lexsort((-np.arange(len(owner)), spans.score))
    order = order[spans.score[order] > -np.inf]
    best[owner[order]] = order
    return best
