"""Questions as token windows: what the model sees, and how its answer leads back to the text.

A passage that is longer than a window gives several features, which overlap by ``stride`` tokens.
A *sample*, in all figures of this job, is one such feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import DatasetError
from .dataset import Question, refusal
from .tokens import Encoded, Longs, Template, Texts, collect_texts, encode, read_template
from .tokens import Ints as Ints


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


class Windows(NamedTuple):
    """All windows of a data set, one entry of each array per window.

    ``question`` counts questions; ``first`` is the window's first passage token among the tokens
    of all passages, ``width`` how many there are, ``front`` how many tokens stand before them.
    ``start`` and ``end`` are the answer's tokens as in :class:`Feature`.
    """

    question: Longs
    first: Longs
    width: Longs
    front: Longs
    start: Longs
    end: Longs

    def take(self, chosen: Any) -> Windows:
        """Some of them, by a slice or an array of indices."""
        return Windows(*(column[chosen] for column in self))


@dataclass(frozen=True)
class Features(Sequence[Feature]):
    """Windows that are put together when they are looked at, from their texts' tokens.

    Less than half the memory of an object per window (``benchmarks.tokenize``), and a passage of
    100,000 words with a thousand questions is held once.
    """

    encoded: Encoded
    template: Template
    windows: Windows

    def __len__(self) -> int:
        return len(self.windows.question)

    @overload
    def __getitem__(self, index: int) -> Feature: ...
    @overload
    def __getitem__(self, index: slice) -> Features: ...
    def __getitem__(self, index: int | slice) -> Feature | Features:
        if isinstance(index, slice):
            return self.take(index)
        question, first, width, front, start, end = (int(column[index]) for column in self.windows)
        passages, questions = self.encoded
        begin, stop = questions.bounds[question : question + 2]
        asked, read = questions.ids[begin:stop], passages.ids[first : first + width]
        offsets = np.full((front + width + len(self.template.suffix), 2), -1, dtype=np.int32)
        offsets[front : front + width] = passages.offsets[first : first + width]
        return Feature(question, _join(self.template, asked, read), offsets, start, end)

    def __iter__(self) -> Iterator[Feature]:
        return (self[index] for index in range(len(self)))

    def take(self, chosen: slice | NDArray[np.int64]) -> Features:
        """Some of them, over the same tokens."""
        return Features(self.encoded, self.template, self.windows.take(chosen))

    @property
    def lengths(self) -> Ints:
        """Every window's number of tokens, special ones included."""
        windows = self.windows
        return (windows.front + windows.width + len(self.template.suffix)).astype(np.int32)


def lengths(features: Sequence[Feature]) -> Ints:
    """Every feature's number of tokens."""
    if isinstance(features, Features):
        return features.lengths
    return np.array([len(feature) for feature in features], dtype=np.int32)


def build_features(
    questions: Sequence[Question],
    tokenizer: Any,
    max_length: int,
    stride: int,
    skipped: list[DatasetError] | None = None,
) -> Features:
    """All windows of all questions, in their order; raises :class:`DatasetError`.

    A question that leaves no room for its passage refuses the whole, or with a list as ``skipped``
    is left out and added to it.
    """
    texts = collect_texts(questions)
    encoded = encode(texts, tokenizer)
    return cut_windows(questions, texts, encoded, tokenizer, (max_length, stride), skipped)


def cut_windows(
    questions: Sequence[Question],
    texts: Texts,
    encoded: Encoded,
    tokenizer: Any,
    size: tuple[int, int],
    skipped: list[DatasetError] | None = None,
) -> Features:
    """As :func:`build_features`, from tokens that are there; ``size`` is (max_length, stride)."""
    template = read_template(tokenizer)
    max_length, stride = size
    asked = encoded.questions.counts
    passages = encoded.passages.counts[texts.passage_of]
    room = max_length - template.specials - asked
    fits = passages <= room
    # Windows that overlap by ``stride`` tokens advance only if they are wider.
    able = fits | (room > stride)
    if not able.all():
        _leave_out(questions, np.flatnonzero(~able), asked, size, skipped)
    step = np.maximum(room - stride, 1)
    pieces = np.where(fits, 1, -(-(passages - room) // step) + 1) * able
    owner = np.repeat(np.arange(len(questions)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skip = number * step[owner]
    width = np.minimum(passages[owner] - skip, room[owner])
    front = len(template.prefix) + asked[owner] + len(template.middle)
    begin = encoded.passages.bounds[texts.passage_of]
    first, last = (side[owner] for side in _answer_tokens(questions, texts, encoded))
    # The answer must be whole in the window; an answer without tokens has last < first.
    whole = (first >= skip) & (last < skip + width) & (first <= last)
    start, end = (np.where(whole, side - skip + front, 0) for side in (first, last))
    windows = Windows(owner, begin[owner] + skip, width, front, start, end)
    return Features(encoded, template, windows)


def _leave_out(
    questions: Sequence[Question],
    bad: Longs,
    asked: Longs,
    size: tuple[int, int],
    skipped: list[DatasetError] | None,
) -> None:
    max_length, stride = size
    problems = [
        DatasetError(
            f"question {questions[index].id!r}: its {asked[index]} tokens leave no room for its "
            f"passage in windows of {max_length} tokens that overlap by {stride}",
            hint="raise --max-length or lower --stride; or --skip-bad-records",
        )
        for index in bad
    ]
    if skipped is None or len(problems) == len(questions):
        raise refusal(problems)
    skipped += problems


def _answer_tokens(
    questions: Sequence[Question], texts: Texts, encoded: Encoded
) -> tuple[Longs, Longs]:
    """The first and last token of every question's first answer, within its passage.

    All at once: characters are made to count on from passage to passage, so that one search
    through all tokens finds them.
    """
    passages = encoded.passages
    sizes = np.array([len(text) + 1 for text in texts.passages], dtype=np.int64)
    shift = np.cumsum(sizes) - sizes
    of_token = np.repeat(shift, passages.counts)
    begins, ends = passages.offsets[:, 0] + of_token, passages.offsets[:, 1] + of_token
    spans = np.array([_bare(question) for question in questions], dtype=np.int64).reshape(-1, 2)
    spans += shift[texts.passage_of][:, None]
    first = np.searchsorted(ends, spans[:, 0], side="right")
    last = np.searchsorted(begins, spans[:, 1], side="left") - 1
    bounds = passages.bounds[texts.passage_of]
    return first - bounds, last - bounds


def _bare(question: Question) -> tuple[int, int]:
    """The first answer's characters, without blanks around it."""
    answer = question.answers[0]
    begin = answer.start + len(answer.text) - len(answer.text.lstrip())
    return begin, begin + len(answer.text.strip())


def _join(template: Template, asked: Ints, read: Ints) -> dict[str, Ints]:
    prefix, middle, suffix, types = template
    inputs = {"input_ids": np.concatenate([prefix, asked, middle, read, suffix])}
    if types is not None:
        before, own, between, theirs, after = types
        kinds = [before, own.repeat(len(asked)), between, theirs.repeat(len(read)), after]
        inputs["token_type_ids"] = np.concatenate(kinds)
    return inputs
