"""Questions as token windows: what the model sees, and how its answer leads back to the text.

A passage that is longer than a window gives several features, which overlap by ``stride`` tokens.
A *sample*, in all figures of this job, is one such feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dataset import Question
from .errors import DatasetError, first_line

CHUNK = 1000
"""Questions per call of the tokenizer, which bounds its memory; it uses all cores inside a call."""

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Feature:
    """One window over one question's passage; every array is as long as the window.

    ``offsets`` has shape (tokens, 2): the characters of the passage that a token covers, or -1 for
    tokens outside the passage. ``start`` and ``end`` are the answer's first and last token, or both
    0 (the [CLS] token) where the answer is not wholly inside this window.
    """

    question: int
    inputs: Mapping[str, Ints]
    offsets: Ints
    start: int
    end: int

    def __len__(self) -> int:
        return len(self.offsets)


def build_features(
    questions: Sequence[Question], tokenizer: Any, max_length: int, stride: int
) -> list[Feature]:
    """All windows of all questions, in their order; raises :class:`DatasetError`."""
    features: list[Feature] = []
    for first in range(0, len(questions), CHUNK):
        chunk = questions[first : first + CHUNK]
        encoded = _tokenize(chunk, tokenizer, max_length, stride)
        for index, owner in enumerate(encoded["overflow_to_sample_mapping"]):
            features.append(_feature(encoded, index, first + owner, chunk[owner]))
    return features


def _tokenize(questions: Sequence[Question], tokenizer: Any, max_length: int, stride: int) -> Any:
    try:
        return tokenizer(
            # Some questions begin with many blanks, which "only_second" could not cut away.
            [question.text.strip() for question in questions],
            [question.context for question in questions],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            padding=False,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
    except Exception as error:
        raise DatasetError(
            f"questions {questions[0].id!r} to {questions[-1].id!r} can't be tokenized in windows "
            f"of {max_length} tokens: {first_line(error)}",
            hint="a question leaves no room for its passage: raise --max-length or lower --stride",
        ) from error


def _feature(encoded: Any, index: int, owner: int, question: Question) -> Feature:
    offsets = np.array(encoded["offset_mapping"][index], dtype=np.int32)
    outside = [sequence != 1 for sequence in encoded.sequence_ids(index)]
    offsets[outside] = -1
    names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    inputs = {name: np.array(encoded[name][index], dtype=np.int32) for name in names}
    answer = question.answers[0]
    begin = answer.start + len(answer.text) - len(answer.text.lstrip())
    start, end = find_tokens(offsets, begin, begin + len(answer.text.strip()))
    return Feature(owner, inputs, offsets, start, end)


def find_tokens(offsets: Ints, begin: int, end: int) -> tuple[int, int]:
    """The first and last token that cover characters ``begin`` to ``end``, or (0, 0)."""
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside):
        return 0, 0
    begins, ends = offsets[inside].T
    if begins[0] > begin or ends[-1] < end:
        return 0, 0
    first = inside[np.searchsorted(ends, begin, side="right")]
    last = inside[np.searchsorted(begins, end, side="left") - 1]
    return int(first), int(last)


def lengths(features: Sequence[Feature]) -> Ints:
    """Every feature's number of tokens."""
    return np.array([len(feature) for feature in features], dtype=np.int32)
