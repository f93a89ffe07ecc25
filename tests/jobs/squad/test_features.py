from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobs.squad.dataset import Answer, Question
from jobs.squad.errors import DatasetError
from jobs.squad.evaluation import normalize
from jobs.squad.features import build_features, find_tokens


def test_labels_lead_back_to_the_answers(questions: list[Question], tokenizer: Any) -> None:
    features = build_features(questions, tokenizer, max_length=384, stride=128)
    assert [feature.question for feature in features] == list(range(len(questions)))
    for feature, question in zip(features, questions, strict=True):
        begin, end = feature.offsets[feature.start][0], feature.offsets[feature.end][1]
        assert question.context[begin:end] == question.answers[0].text


def test_long_passages_give_overlapping_windows(questions: list[Question], tokenizer: Any) -> None:
    features = build_features(questions, tokenizer, max_length=48, stride=16)
    assert len(features) > 2 * len(questions)
    assert max(map(len, features)) == 48
    for index, question in enumerate(questions):
        windows = [feature for feature in features if feature.question == index]
        covered: set[int] = set()
        for window in windows:
            inside = window.offsets[window.offsets[:, 0] >= 0]
            covered.update(*(range(begin, end) for begin, end in inside))
        blanks = {i for i, character in enumerate(question.context) if character.isspace()}
        assert covered == set(range(len(question.context))) - blanks
        labelled = [window for window in windows if window.start]
        assert labelled, "every short answer is whole in some window"
        for window in labelled:
            text = question.context[window.offsets[window.start][0] : window.offsets[window.end][1]]
            assert normalize(text) == normalize(question.answers[0].text)
        for window in windows:
            assert (window.start == 0) == (window.end == 0)


def test_blanks_around_questions_and_answers_do_no_harm(tokenizer: Any) -> None:
    context = "  eight tile registers "
    question = Question("q", "   \n how many?", context, (Answer("  eight ", 0),))
    (feature,) = build_features([question], tokenizer, max_length=32, stride=8)
    begin, end = feature.offsets[feature.start][0], feature.offsets[feature.end][1]
    assert context[begin:end] == "eight"


def test_find_tokens_needs_the_whole_answer() -> None:
    offsets = np.array([[-1, -1], [0, 3], [4, 7], [7, 9], [-1, -1]], dtype=np.int32)
    assert find_tokens(offsets, 0, 3) == (1, 1)
    assert find_tokens(offsets, 4, 9) == (2, 3)
    assert find_tokens(offsets, 5, 8) == (2, 3)  # inside words: the words themselves
    assert find_tokens(offsets, 4, 10) == (0, 0)
    assert find_tokens(offsets[2:], 0, 9) == (0, 0)
    assert find_tokens(offsets[:1], 0, 3) == (0, 0)


def test_a_question_without_room_for_its_passage_is_named(tokenizer: Any) -> None:
    question = Question("long", "which core? " * 20, "eight cores", (Answer("eight", 0),))
    with pytest.raises(DatasetError, match=r"'long'.*windows of 32 tokens"):
        build_features([question], tokenizer, max_length=32, stride=8)
