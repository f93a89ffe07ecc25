from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.squad.dataset import Answer, Question, all_texts
from jobs.worker.tasks.squad.features import Features, build_features
from tests.jobs.worker.tokenizer_families import KINDS


def offsets_of(features: Features, index: int) -> list[list[int]]:
    """Return the characters of the passage that each token of a window covers, -1 for other tokens."""
    first, width, front = (int(column[index]) for column in features.windows[1:4])
    found = [[-1, -1] for _ in range(len(features[index]))]
    found[front : front + width] = features.encoded.passages.offsets[first : first + width].tolist()
    return found


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest, questions: list[Question]) -> Any:
    return KINDS[request.param](list(all_texts(questions)))


ODD = [
    Question("first", "tile?", "tile registers hold rows", (Answer("tile", 0),)),
    Question("nul", "why\0so?", "a\0tile \u200b register", (Answer("register", 9),)),
    Question("accents", "é or e\u0301?", "cafe\u0301 and Ⅷ ﬁles 𝔸 你好", (Answer("ﬁles", 12),)),
    Question("nothing", "which?", "\u200b", (Answer("\u200b", 0),)),
    Question("part of a word", "what?", "the registers", (Answer("gist", 6),)),
    Question("blanks", "  \n how many?", "  eight tile registers ", (Answer("  eight ", 0),)),
    Question("no answer", "how many?", "eight tile registers hold rows of data " * 10, ()),
]


@pytest.mark.parametrize(("max_length", "stride"), [(384, 128), (64, 16), (64, 0)])
def test_windows_are_those_of_the_library(
    questions: list[Question], any_tokenizer: Any, max_length: int, stride: int
) -> None:
    asked = questions + ODD
    features = build_features(asked, any_tokenizer, max_length, stride)
    encoded = any_tokenizer(
        [question.text.strip() for question in asked],
        [question.context for question in asked],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = encoded["overflow_to_sample_mapping"]
    assert [feature.question for feature in features] == owners
    assert features.lengths.tolist() == [len(feature) for feature in features]
    names = {"input_ids", "token_type_ids"} & encoded.keys()
    for index, feature in enumerate(features):
        assert set(feature.inputs) == names
        for name in names:
            assert feature.inputs[name].tolist() == encoded[name][index]
        theirs = encoded["offset_mapping"][index]
        sides = encoded.sequence_ids(index)
        expected = [
            list(pair) if side == 1 else [-1, -1] for pair, side in zip(theirs, sides, strict=True)
        ]
        ours = offsets_of(features, index)
        front = sides.index(1) if 1 in sides else 0
        # The library leaves the blank before a window's first word in it, RoBERTa's way: we do not.
        context = asked[feature.question].context
        assert context[slice(*ours[front])].strip() == context[slice(*expected[front])].strip()
        assert ours[front + 1 :] == expected[front + 1 :]
        assert (feature.start, feature.end) == find_tokens(ours, asked[feature.question])


def find_tokens(offsets: list[list[int]], question: Question) -> tuple[int, int]:
    """Return the first and last token of the first answer, by a linear search."""
    if not question.answers:
        return 0, 0
    answer = question.answers[0]
    begin = answer.start + len(answer.text) - len(answer.text.lstrip())
    end = begin + len(answer.text.strip())
    tokens = [(n, *pair) for n, pair in enumerate(offsets) if pair[0] >= 0]
    inside = [n for n, first, last in tokens if last > begin and first < end]
    if not inside or tokens[0][1] > begin or tokens[-1][2] < end:
        return 0, 0
    return inside[0], inside[-1]


def test_questions_without_room_for_their_passage_are_counted(tokenizer: Any) -> None:
    good = Question("short", "which?", "eight cores", (Answer("eight", 0),))
    asked = [replace(good, id=f"long{n}", text="which core? " * 20) for n in (1, 2)]
    with pytest.raises(DatasetError) as raised:
        build_features([good, *asked], tokenizer, max_length=32, stride=8)
    assert raised.value.message == (
        "question 'long1': its 60 tokens leave no room for its passage in windows of 32 tokens "
        "that overlap by 8 (and 1 more bad record)"
    )
    assert "--skip-bad-records" in str(raised.value.hint)

    skipped: list[DatasetError] = []
    features = build_features([asked[0], good, asked[1]], tokenizer, 32, 8, skipped)
    assert [feature.question for feature in features] == [1]
    assert len(skipped) == 2
    with pytest.raises(DatasetError, match="long1"):
        build_features(asked, tokenizer, 32, 8, [])
    with pytest.raises(DatasetError, match="windows of 64 tokens that overlap by 1"):
        build_features(asked, tokenizer, 60 + 3 + 1, 1)  # each window would be all overlap
