"""The tokens of a data set's texts, as a few flat arrays, and samples of one or two of these texts.

Every text is tokenized once and alone; a sample is assembled from the tokens of its one or two texts. A fast
tokenizer does the same: it encodes both texts of a pair separately and joins them by its template of special
tokens (https://huggingface.co/docs/tokenizers/pipeline#post-processing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import DatasetError, ModelError, first_line

CHUNK = 1000
"""Texts per tokenizer call, to limit its memory; a call uses all cores."""

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_COUNTED = 1 << 24
_NO_TOKENS: Ints = np.zeros(0, dtype=np.int32)
_NO_OFFSETS: Ints = np.zeros((0, 2), dtype=np.int32)


class Tokens(NamedTuple):
    """Texts as tokens, without special tokens: text ``n`` is ``ids[bounds[n] : bounds[n + 1]]``.

    ``ids`` has shape (tokens,), ``bounds`` (texts + 1,). ``offsets``, shape (tokens, 2), are the
    characters that each token covers in its text; empty if they are not needed.
    """

    ids: Ints
    bounds: Longs
    offsets: Ints = _NO_OFFSETS

    @property
    def counts(self) -> Longs:
        """Every text's number of tokens."""
        counts: Longs = np.diff(self.bounds)
        return counts


class Template(NamedTuple):
    """How a tokenizer joins one or two texts: the token IDs around and between them, and each part's type.

    ``types`` are the token types (segments) of prefix, first text, middle, second text, and suffix, each
    one per special token and a single one for a text; ``None`` for models without.
    """

    prefix: Ints
    middle: Ints
    suffix: Ints
    types: tuple[Ints, ...] | None

    @property
    def specials(self) -> int:
        """Special tokens per window."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def digest(self, *arrays: NDArray[Any]) -> str:
        """Return a digest of it and of arrays."""
        own = (self.prefix, self.middle, self.suffix, *(self.types or ()))
        return digest_arrays(*own, *arrays)

    def token_ids(self, *texts: Tokens) -> Longs:
        """Return the IDs that occur in it or in any text, ascending."""
        own = np.concatenate([self.prefix, self.middle, self.suffix])
        return distinct(own, *(each.ids for each in texts))

    def join(self, first: Ints, second: Ints = _NO_TOKENS) -> dict[str, Ints]:
        """Return the model's inputs for the tokens of one text, or of two."""
        prefix, middle, suffix, types = self
        inputs = {"input_ids": np.concatenate([prefix, first, middle, second, suffix])}
        if types is not None:
            before, own, between, theirs, after = types
            kinds = [before, own.repeat(len(first)), between, theirs.repeat(len(second)), after]
            inputs["token_type_ids"] = np.concatenate(kinds)
        return inputs


class Column(NamedTuple):
    """One text of each sample, or texts shared by samples; ``offsets``: whether they are needed."""

    texts: Sequence[str]
    offsets: bool = False


def distinct(*arrays: Any) -> Longs:
    """Return the IDs that occur in any of these arrays, which may be larger than the memory, ascending."""
    found: Longs = np.zeros(0, dtype=np.int64)
    for array in arrays:
        for first in range(0, len(array), _COUNTED):
            some = np.flatnonzero(np.bincount(array[first : first + _COUNTED]))
            found = np.union1d(found, some).astype(np.int64)
    return found


def digest_arrays(*arrays: NDArray[Any]) -> str:
    """Return a digest of arrays. Of 10 million texts, it takes seconds; as Python objects, minutes."""
    found = blake2b(digest_size=16)
    for array in arrays:
        found.update(f"{array.dtype} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).ravel().data)
    return found.hexdigest()


def encode(columns: Sequence[Column], tokenizer: Any) -> list[Tokens]:
    """Return each column's tokens, without special tokens. Raises :class:`DatasetError`."""

    def tokenize(texts: Sequence[str], offsets: bool) -> Tokens:
        chunks = (texts[first : first + CHUNK] for first in range(0, len(texts), CHUNK))
        return join_tokens([_tokenize(each, tokenizer, offsets) for each in chunks])

    return [tokenize(*column) for column in columns]


def join_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Return the texts of all parts, in order."""
    counts = [np.zeros(1, dtype=np.int64), *(part.counts for part in parts)]
    return Tokens(
        np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids for part in parts)]),
        np.cumsum(np.concatenate(counts)),
        np.concatenate([_NO_OFFSETS, *(part.offsets for part in parts)]),
    )


def _tokenize(texts: Sequence[str], tokenizer: Any, with_offsets: bool) -> Tokens:
    try:
        encoded = tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=with_offsets,
            # Otherwise it warns about passages longer than a window.
            verbose=False,
        )
    # Tokenizers raise many types; the text is among these.
    except Exception as error:
        raise DatasetError(
            f"the texts from {texts[0][:40]!r} on can't be tokenized: {first_line(error)}"
        ) from error
    ids = encoded["input_ids"]
    bounds = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(ids), np.int32, bounds[-1])
    if not with_offsets:
        return Tokens(flat, bounds)
    pairs = chain.from_iterable(encoded["offset_mapping"])
    offsets = np.fromiter(chain.from_iterable(pairs), np.int32, 2 * bounds[-1])
    return Tokens(flat, bounds, offsets.reshape(-1, 2))


def read_template(tokenizer: Any, *, pair: bool = True) -> Template:
    """Return how a tokenizer joins two texts or wraps one. Raises :class:`ModelError`."""
    texts = ("which", "eight cores")[: 1 + pair]
    joined = tokenizer(*texts)
    sides = joined.sequence_ids(0)
    inside = [[place for place, side in enumerate(sides) if side == n] for n in range(len(texts))]
    ids, alone = joined["input_ids"], tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    # This module requires the texts in this order, with the tokens that they have alone.
    as_alone = all(alone) and [[ids[place] for place in places] for places in inside] == alone
    if not as_alone or inside[0][-1] > inside[-1][-1]:
        raise ModelError(
            f"the tokenizer {type(tokenizer).__name__} does not join a question and its passage",
            hint="use a model with a tokenizer for pairs of texts, such as BERT's or RoBERTa's",
        )
    (begin, end), (second, last) = (
        (places[0], places[-1] + 1) for places in (inside[0], inside[-1])
    )
    cuts = [0, begin, end, *((second, last) if pair else (end, end)), len(ids)]
    parts = [slice(first, stop) for first, stop in pairwise(cuts)]
    prefix, _, middle, _, suffix = (np.array(ids[part], dtype=np.int32) for part in parts)
    if "token_type_ids" not in joined:
        return Template(prefix, middle, suffix, None)
    kinds = [np.array(joined["token_type_ids"][part], dtype=np.int32) for part in parts]
    types = (kinds[0], kinds[1][:1], kinds[2], kinds[3][:1], kinds[4])
    return Template(prefix, middle, suffix, types)


@dataclass(frozen=True)
class TextSample:
    """One sample: the model's inputs, and what it is to learn, such as the number of a class.

    ``front`` is the number of special tokens before the first text.
    """

    inputs: Mapping[str, Ints]
    target: Any
    front: int

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])


@dataclass(frozen=True)
class TextSamples:
    """Samples of one text each, or of two.

    ``targets`` has an entry per sample; if that is an array, an entry per token of a single text.
    """

    columns: Sequence[Tokens]
    template: Template
    targets: Sequence[Any]
    max_length: int

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def room(self) -> int:
        """The maximum number of text tokens in a sample."""
        return self.max_length - self.template.specials

    @cached_property
    def lengths(self) -> Ints:
        """Every sample's number of tokens, with special tokens."""
        specials = self.template.specials
        counts = sum(column.counts for column in self.columns)
        return np.minimum(counts + specials, self.max_length).astype(np.int32)

    def __getitem__(self, index: int) -> TextSample:
        texts = [column.ids[slice(*column.bounds[index : index + 2])] for column in self.columns]
        room, target = self.room, self.targets[index]
        if len(texts) == 2:
            # Each keeps its half, the longer one an odd token, and the rest of the other's.
            half = (room + (len(texts[0]) > len(texts[1]))) // 2
            texts = [texts[0][: max(half, room - len(texts[1]))], texts[1]]
            room -= len(texts[0])
        texts[-1] = texts[-1][:room]
        inputs = self.template.join(*texts)
        if isinstance(target, np.ndarray):
            target = target[:room]
        return TextSample(inputs, target, len(self.template.prefix))

    def token_ids(self) -> Longs:
        """Return the IDs that occur in any text, also where it is cut off, ascending."""
        return self.template.token_ids(*self.columns)

    def digest(self) -> str:
        """Return a digest of all samples."""
        targets: Any = self.targets
        if not isinstance(targets, np.ndarray | range):
            each = (x.tolist() if isinstance(x, np.ndarray) else x for x in targets)
            targets = np.frombuffer(";".join(map(str, each)).encode(), np.uint8)
        texts = (array for tokens in self.columns for array in (tokens.ids, tokens.bounds))
        return self.template.digest(*texts, np.asarray(targets), np.array([self.max_length]))
