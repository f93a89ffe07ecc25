from __future__ import annotations

import numpy as np
import pytest

from jobs.squad.dataset import Answer, Question
from jobs.squad.evaluation import (
    MAX_ANSWER_TOKENS,
    Scores,
    best_span,
    exact_match,
    f1,
    normalize,
    score,
)
from jobs.squad.features import Feature


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Cat's, \n a hat!", "cats hat"),
        ("another theatre", "another theatre"),
        ("A-b", "ab"),
        ("$26.19", "2619"),
        ("the", ""),
        ("São “Paulo”", "são “paulo”"),  # only ASCII punctuation goes, as in the official script
    ],
)
def test_normalize(text: str, bare: str) -> None:
    assert normalize(text) == bare


@pytest.mark.parametrize(
    ("prediction", "truth", "em", "overlap"),
    [
        ("the Linux kernel", "Linux kernel.", 1, 1),
        ("Linux", "Linux kernel", 0, 2 / 3),
        ("kernel of Linux", "Linux kernel", 0, 4 / 5),
        ("cores", "threads", 0, 0),
        ("", "threads", 0, 0),
        ("two two", "two", 0, 2 / 3),
        ("an", "the", 1, 0),  # nothing is left of either: equal, but no word in common
    ],
)
def test_measures(prediction: str, truth: str, em: float, overlap: float) -> None:
    assert exact_match(prediction, truth) == em
    assert f1(prediction, truth) == pytest.approx(overlap)


def test_score_takes_the_best_accepted_answer() -> None:
    context = "eight tile registers"
    answers = (Answer("eight tile registers", 0), Answer("eight", 0))
    asked = [Question("a", "?", context, answers), Question("b", "?", context, answers[:1])]
    found = score(asked, {"a": "Eight", "b": "tile registers", "unasked": "no"})
    assert isinstance(found, Scores)
    assert found == pytest.approx((50.0, (100 + 80) / 2))


def feature(tokens: int, outside: int) -> Feature:
    """``outside`` tokens of the question, then tokens of two characters each with a blank after."""
    offsets = np.full((tokens, 2), -1, dtype=np.int32)
    offsets[outside:, 0] = 3 * np.arange(tokens - outside)
    offsets[outside:, 1] = offsets[outside:, 0] + 2
    return Feature(0, {"input_ids": np.zeros(tokens, dtype=np.int32)}, offsets, 0, 0)


def test_best_span_never_leaves_the_passage_nor_ends_before_its_start() -> None:
    start = np.array([99, 1, 0, 5, 0, 0], dtype=np.float32)
    end = np.array([99, 1, 6, 0, 4, 0], dtype=np.float32)
    # Tokens 0 and 1 are the question's; (3, 2) would score most but runs backwards.
    span = best_span(start, end, feature(6, outside=2))
    assert span == (9.0, 3, 8)


def test_best_span_is_the_best_of_all_allowed_ones() -> None:
    random = np.random.default_rng(7)
    window = feature(60, outside=9)
    start, end = random.normal(size=(2, 60)).astype(np.float32)
    allowed = [
        (start[i] + end[j], 3 * (i - 9), 3 * (j - 9) + 2)
        for i in range(9, 60)
        for j in range(i, min(60, i + MAX_ANSWER_TOKENS))
    ]
    assert best_span(start, end, window) == max(allowed)


def test_a_window_without_passage_has_no_span() -> None:
    logits = np.zeros(4, dtype=np.float32)
    assert best_span(logits, logits, feature(4, outside=4)) is None
