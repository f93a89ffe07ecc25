from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobs.worker.data.tokens import Template, Tokens
from jobs.worker.tasks.squad.answers import (
    MAX_ANSWER_TOKENS,
    NO_SPAN,
    SPAN,
    best_per_question,
    best_spans,
    null_odds,
)
from jobs.worker.tasks.squad.features import Encoded, Features, Windows

NONE = np.zeros(0, dtype=np.int32)


def windows(*sizes: tuple[int, int]) -> Features:
    """One window per (tokens before the passage, tokens of it), each of a passage of its own.

    A passage's tokens have two characters each, with a blank after.
    """
    front, width = np.array(sizes, dtype=np.int64).T
    bounds = np.concatenate([[0], np.cumsum(width)])
    begins = np.concatenate([3 * np.arange(count) for count in width])
    offsets = np.stack([begins, begins + 2], axis=1).astype(np.int32)
    passages = Tokens(np.zeros(len(begins), dtype=np.int32), bounds, offsets)
    owner = np.arange(len(sizes))
    zeros = np.zeros(len(sizes), dtype=np.int64)
    encoded = Encoded(passages, Tokens(NONE, np.zeros(len(sizes) + 1, dtype=np.int64)))
    template = Template(NONE, NONE, NONE, None)
    return Features(encoded, template, Windows(owner, bounds[:-1], width, front, zeros, zeros))


def rows(*values: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def only(spans: Any) -> tuple[float, int, int]:
    score, begin, end, _ = spans.item()
    return score, begin, end


@pytest.mark.parametrize("longest", [1, MAX_ANSWER_TOKENS, 45, 100])
def test_a_span_is_the_best_of_all_allowed_ones_whatever_its_batch(longest: int) -> None:
    widths = [1, 2, 29, 30, 31, 60] * 10
    starts, ends = np.random.default_rng(1).normal(size=(2, len(widths), 70)).astype(np.float32)
    found = best_spans(starts, ends, windows(*((9, width) for width in widths)), longest)
    for span, start, end, width in zip(found, starts, ends, widths, strict=True):
        allowed = [
            (float(start[i] + end[j]), 3 * (i - 9), 3 * (j - 9) + 2)
            for i in range(9, 9 + width)
            for j in range(i, min(9 + width, i + longest))
        ]
        assert only(span) == max(allowed)


def test_the_first_of_equal_spans_wins() -> None:
    same = np.zeros((1, 40), dtype=np.float32)
    assert only(best_spans(same, same, windows((2, 38)))) == (0.0, 0, 2)


def test_no_passage_or_no_number_means_no_span() -> None:
    logits = rows([1, 2, 3], [np.nan] * 3, [1, np.nan, 2], [1, 2, 3])
    spans = best_spans(logits, logits, windows((3, 0), (1, 2), (0, 3), (1, 2)))
    assert spans["score"].tolist() == [-np.inf, -np.inf, 4.0, 6.0]
    assert spans[["begin", "end"]].tolist() == [(0, 0), (0, 0), (6, 8), (3, 5)]
    # Nor do passages of which none has a token.
    assert only(best_spans(logits[:1], logits[:1], windows((3, 0)))) == (-np.inf, 0, 0)


def test_a_question_takes_the_first_of_its_best_windows() -> None:
    spans, owner = np.zeros(6, dtype=SPAN), np.array([0, 0, 0, 1, 3, 3])
    spans["score"] = [1, 3, 3, -np.inf, 2, 0]
    assert best_per_question(spans, owner, 5).tolist() == [1, -1, -1, 4, -1]


def test_no_answer_scores_as_in_the_window_where_it_scores_least() -> None:
    start, end = rows([5, 0, 1], [2, 0, 4], [1, 0, 2], [np.nan, 0, 1]), rows(*[[1.0, 0.0, 1.0]] * 4)
    spans = best_spans(start, end, windows(*[(1, 2)] * 4))
    assert spans["null"][:3].tolist() == [6, 3, 2]
    owner = np.array([0, 0, 2, 3])
    best = best_per_question(spans, owner, 4)
    # Question 1 has no window, and question 3 no number at its first token.
    assert null_odds(spans, owner, best).tolist() == [3 - 5, NO_SPAN, 2 - 3, NO_SPAN]
