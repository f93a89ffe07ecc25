"""Features: questions as token windows, with the positions of their tokens in the text.

A passage longer than a window has several features, which overlap by ``stride`` tokens. In all metrics of
this task, a *sample* is one feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...data.records import refusal
from ...data.tokens import Column, Ints, Longs, Template, Tokens, encode, read_template
from ...runtime.errors import DatasetError
from .dataset import Question


class Texts(NamedTuple):
    """A data set's texts: every passage once, every question, and each question's passage."""

    passages: list[str]
    questions: list[str]
    passage_of: Longs

    @property
    def columns(self) -> tuple[Column, Column]:
        """The texts to tokenize for :class:`Encoded`."""
        return Column(self.passages, offsets=True), Column(self.questions)


class Encoded(NamedTuple):
    """The tokens of :class:`Texts`; the passages' tokens have offsets."""

    passages: Tokens
    questions: Tokens


@dataclass(frozen=True)
class Feature:
    """One window over one question's passage.

    ``start`` and ``end`` are the answer's first and last token, or both 0 (the [CLS] token) if there is no
    answer, or it is not completely inside this window.
    """

    question: int
    inputs: Mapping[str, Ints]
    start: int
    end: int

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])


class Windows(NamedTuple):
    """All windows of a data set, one entry of each array per window.

    ``question`` is the question's index; ``first`` is the window's first passage token among the tokens
    of all passages, ``width`` the number of passage tokens, ``front`` the number of tokens before them.
    ``start`` and ``end`` are those of :class:`Feature`.
    """

    question: Longs
    first: Longs
    width: Longs
    front: Longs
    start: Longs
    end: Longs


@dataclass(frozen=True)
class Features(Sequence[Feature]):
    """Windows that are assembled from their texts' tokens on access.

    They take less than half the memory of an object per window (benchmarks/log.jsonl): a passage with
    a thousand questions is stored once.
    """

    encoded: Encoded
    template: Template
    windows: Windows

    def __len__(self) -> int:
        return len(self.windows.question)

    def __getitem__(self, index: Any) -> Any:
        question, first, width, _, start, end = (int(column[index]) for column in self.windows)
        passages, questions = self.encoded
        begin, stop = questions.bounds[question : question + 2]
        asked, read = questions.ids[begin:stop], passages.ids[first : first + width]
        return Feature(question, self.template.join(asked, read), start, end)

    def take(self, chosen: Longs) -> Features:
        """Return the windows at these indices, over the same tokens."""
        return replace(self, windows=Windows(*(column[chosen] for column in self.windows)))

    @property
    def lengths(self) -> Ints:
        """Every window's number of tokens, including special tokens."""
        windows = self.windows
        return (windows.front + windows.width + len(self.template.suffix)).astype(np.int32)

    def token_ids(self) -> Longs:
        """Return the IDs that occur in the windows' texts, ascending."""
        return self.template.token_ids(*self.encoded)

    def digest(self) -> str:
        """Return a digest of the windows in order: the data may change under the same path."""
        texts = (array for tokens in self.encoded for array in (tokens.ids, tokens.bounds))
        return self.template.digest(*texts, *self.windows)


def collect_texts(questions: Sequence[Question]) -> Texts:
    """Return the texts to tokenize, in the questions' order."""
    numbers: dict[str, int] = {}
    owners = [numbers.setdefault(question.context, len(numbers)) for question in questions]
    # Some questions begin with many spaces, which some tokenizers would keep.
    asked = [question.text.strip() for question in questions]
    return Texts(list(numbers), asked, np.array(owners, dtype=np.int64))


def build_features(
    questions: Sequence[Question],
    tokenizer: Any,
    max_length: int,
    stride: int,
    skipped: list[DatasetError] | None = None,
    tokenize: Callable[[Sequence[Column]], list[Tokens]] | None = None,
) -> Features:
    """Return all windows of all questions, in order. Raises :class:`DatasetError`.

    A question that leaves no room for its passage is an error; with a list ``skipped``, it is left out and
    added to the list. ``tokenize`` replaces :func:`..data.tokens.encode`.
    """
    texts, template = collect_texts(questions), read_template(tokenizer)
    tokens = tokenize(texts.columns) if tokenize else encode(texts.columns, tokenizer)
    encoded = Encoded(*tokens)
    asked = encoded.questions.counts
    passages = encoded.passages.counts[texts.passage_of]
    room = max_length - template.specials - asked
    fits = passages <= room
    # Windows that overlap by ``stride`` tokens must be wider to advance.
    able = fits | (room > stride)
    if not able.all():
        problems = [
            DatasetError(
                f"question {questions[int(index)].id!r}: its {asked[index]} tokens leave no room for its "
                f"passage in windows of {max_length} tokens that overlap by {stride}",
                hint="raise --max-length, lower --stride, or use --skip-bad-records",
            )
            for index in np.flatnonzero(~able)
        ]
        if skipped is None or not able.any():
            raise refusal(problems)
        skipped += problems
    step = np.maximum(room - stride, 1)
    pieces = np.where(fits, 1, -(-(passages - room) // step) + 1) * able
    owner = np.repeat(np.arange(len(questions)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skip = number * step[owner]
    width = np.minimum(passages[owner] - skip, room[owner])
    front = len(template.prefix) + asked[owner] + len(template.middle)
    begin = encoded.passages.bounds[texts.passage_of]
    first, last = (side[owner] for side in _answer_tokens(questions, texts, encoded))
    # The answer must be completely in the window; one without tokens has last < first.
    whole = (first >= skip) & (last < skip + width) & (first <= last)
    start, end = (np.where(whole, side - skip + front, 0) for side in (first, last))
    windows = Windows(owner, begin[owner] + skip, width, front, start, end)
    return Features(encoded, template, windows)


def _answer_tokens(
    questions: Sequence[Question], texts: Texts, encoded: Encoded
) -> tuple[Longs, Longs]:
    """Return the first and last token of every question's first answer, within its passage.

    Characters are numbered across all passages, so that one search through all tokens finds them.
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
    """Return the first answer's character range, without surrounding spaces; an empty one for no answer."""
    if not question.answers:
        return 0, 0
    answer = question.answers[0]
    begin = answer.start + len(answer.text) - len(answer.text.lstrip())
    return begin, begin + len(answer.text.strip())
