"""The samples of language models: texts joined and cut, or one text each of which some tokens are learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.tokens import (
    Ints,
    Longs,
    TextSample,
    Tokens,
    digest_arrays,
    distinct,
    read_template,
)
from ...runtime.errors import DatasetError
from ...training.task import Loaded
from .head import IGNORED
from .templates import Rendered

SAME = 0.1
"""Weights that differ by at most this share are those of one token to the model."""


def read_prefix(tokenizer: Any) -> Ints:
    """Return the tokens before a plain text: BOS, for Llama, Gemma, and others.

    A tokenizer that also ends texts is like BERT's: plain texts are learned without its marks.
    """
    template = read_template(tokenizer, pair=False)
    return template.suffix[:0] if len(template.suffix) else template.prefix


@dataclass(frozen=True)
class Packed:
    """Texts one after the other, each between ``prefix`` and ``end``, cut into samples of ``length`` tokens.

    The last sample may be shorter. A sample that begins within a text has no prefix there. Prefixes are not
    learned: no text teaches where the next one begins.
    """

    tokens: Tokens
    end: int
    length: int
    prefix: Ints

    @cached_property
    def _places(self) -> Longs:
        """The places of all texts' prefixes and ends, in order."""
        bounds, before = self.tokens.bounds, len(self.prefix)
        around = np.append(np.repeat(bounds[:-1, None], before, axis=1), bounds[1:, None], axis=1)
        places: Longs = around.ravel() + np.arange(around.size)
        return places

    @cached_property
    def size(self) -> int:
        """The number of tokens."""
        size = len(self.tokens.ids) + len(self._places)
        # A last sample of one token predicts nothing.
        return size - (size > 1 and size % self.length == 1)

    def __len__(self) -> int:
        return -(-self.size // self.length)

    @cached_property
    def lengths(self) -> Ints:
        """Every sample's number of tokens."""
        lengths = np.full(len(self), self.length, dtype=np.int32)
        lengths[-1] = self.size - self.length * (len(self) - 1)
        return lengths

    @cached_property
    def predicted(self) -> Longs:
        """Every sample's number of learned tokens: all but its first one and prefixes."""
        prefixes = self._places.reshape(-1, len(self.prefix) + 1)[:, :-1].ravel()
        others = prefixes[prefixes % self.length > 0] // self.length
        predicted: Longs = self.lengths - 1 - np.bincount(others, minlength=len(self))
        return predicted

    def __getitem__(self, index: int) -> TextSample:
        begin = index * self.length
        stop = min(begin + self.length, self.size)
        first, last = (int(each) for each in np.searchsorted(self._places, (begin, stop)))
        ids = self.tokens.ids[begin - first : stop - last]
        numbers = np.arange(last - first)
        mark = (first + numbers) % (len(self.prefix) + 1)
        places = self._places[first:last] - begin - numbers
        ids, labels = (
            np.insert(ids, places, np.append(each, self.end)[mark])
            for each in (self.prefix, np.full_like(self.prefix, IGNORED))
        )
        return TextSample({"input_ids": ids, "labels": labels}, None, 0)

    def token_ids(self) -> Longs:
        """Return the IDs in all samples, ascending."""
        return distinct([*self.prefix, self.end], self.tokens.ids)

    def digest(self) -> str:
        """Return a digest of all samples."""
        marks = np.array([self.length, self.end, *self.prefix])
        return digest_arrays(marks, self.tokens.bounds, self.tokens.ids)


@dataclass(frozen=True)
class Masked:
    """One text per sample, after the tokens ``prefix``, cut at ``length`` tokens.

    Of text ``n``, the tokens are learned where ``learned``, which has an entry per token, says so. The
    samples are those ``rows`` of the texts.
    """

    tokens: Tokens
    learned: NDArray[np.bool_]
    prefix: Ints
    length: int
    rows: Longs

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def room(self) -> int:
        """The maximum number of a text's tokens in a sample."""
        return self.length - len(self.prefix)

    @cached_property
    def lengths(self) -> Ints:
        """Every sample's number of tokens."""
        counts = self.tokens.counts[self.rows] + len(self.prefix)
        return np.minimum(counts, self.length).astype(np.int32)

    @cached_property
    def predicted(self) -> Longs:
        """Every sample's number of learned tokens. The first token of a sample is not predicted."""
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.learned)])
        first = self.tokens.bounds[self.rows]
        last = first + np.minimum(self.tokens.counts[self.rows], self.room)
        counts: Longs = before[last] - before[first + (not len(self.prefix))]
        return counts

    def __getitem__(self, index: int) -> TextSample:
        first, last = self.tokens.bounds[self.rows[index] : self.rows[index] + 2]
        part = slice(first, min(last, first + self.room))
        ids = np.concatenate([self.prefix, self.tokens.ids[part]])
        labels = np.where(self.learned[part], self.tokens.ids[part], IGNORED)
        ignored = np.full(len(self.prefix), IGNORED, dtype=np.int32)
        inputs = {"input_ids": ids, "labels": np.concatenate([ignored, labels])}
        return TextSample(inputs, None, len(self.prefix))

    def token_ids(self) -> Longs:
        """Return the IDs that occur in any text, also where it is cut off, ascending."""
        return distinct(self.prefix, self.tokens.ids)

    def digest(self) -> str:
        """Return a digest of all samples."""
        tokens, size = self.tokens, np.array([self.length])
        return digest_arrays(size, self.prefix, tokens.bounds, tokens.ids, self.learned, self.rows)


def mask_texts(
    tokens: Tokens,
    rendered: Sequence[Rendered],
    prefix: Sequence[int],
    length: int,
    note: Callable[[str], None],
) -> Masked:
    """Return samples of texts; those whose learned tokens are all cut off are left out.

    Notes count both. Raises :class:`DatasetError` if none is left.
    """
    learned = np.zeros(len(tokens.ids), dtype=np.bool_)
    for number, each in enumerate(rendered):
        part = slice(*tokens.bounds[number : number + 2])
        starts, ends = tokens.offsets[part].T
        for first, last in each.learned:
            learned[part] |= (ends > first) & (starts < last)
    begin = np.asarray(prefix, dtype=np.int32)
    every = Masked(tokens, learned, begin, length, np.arange(len(rendered)))
    kept = np.flatnonzero(every.predicted)
    what, cut = f"samples are longer than {length} tokens", int((tokens.counts > every.room).sum())
    lost = len(rendered) - len(kept)
    if not len(kept):
        raise DatasetError(
            f"all {len(rendered)} {what}, and nothing to learn is left of any",
            hint="raise --max-length, or shorten the prompts",
        )
    if cut or lost:
        more = f"; {lost} without any token to learn are left out" if lost else ""
        note(f"{cut} of {len(rendered)} {what} and are cut{more}; --max-length keeps more")
    return replace(every, rows=kept)


def learn_end(samples: Masked, loaded: Loaded, note: Callable[[str], None], *, lora: bool) -> None:
    """Let the saved model end an answer as the chat template does, if that has a token for it."""
    tokenizer = loaded.tokenizer
    # The shortest sample is not cut.
    labels = samples[int(samples.lengths.argmin())].inputs["labels"]
    words = ((int(each), tokenizer.decode([int(each)])) for each in labels[labels >= 0][::-1])
    number, word = next((pair for pair in words if pair[1].strip()), (0, ""))
    if word not in tokenizer.get_added_vocab():
        note(
            "the chat template ends the assistant's turns without a special token, so the model may not "
            "learn to stop"
        )
        return
    if not _can_learn(loaded, number):
        # Frozen embeddings are the head's weights in many models.
        cause = "adapters don't change" if lora else "frozen embeddings keep"
        note(
            f"warning: the model may not learn to stop: its weights for {word!r} are those of an unused "
            f"token, and {cause} them; train a model that knows chats, or omit "
            + ("--lora" if lora else "--freeze-layers")
        )
    if number != tokenizer.eos_token_id:
        note(f"answers end with {word!r}, as the chat template writes them")
        tokenizer.eos_token = word
        if settings := getattr(loaded.model, "generation_config", None):
            settings.eos_token_id = number


def _can_learn(loaded: Loaded, token: int) -> bool:
    """Return whether training can make a token likely whose weights may be those of unused tokens.

    Models that were never trained on chats have such weights: https://github.com/QwenLM/Qwen3/issues/1064.
    """
    weight = loaded.model.get_output_embeddings().weight
    if weight.requires_grad:
        return True
    unused = {*loaded.tokenizer.get_added_vocab().values()} - {token}
    unused |= {*range(len(loaded.tokenizer), len(weight))}
    # Llama 3.2 Vision reads tokens that it can't write.
    others = weight[[each for each in unused if each < len(weight)]].float()
    own = weight[token].float()
    return not bool(((others - own).norm(dim=1) <= SAME * own.norm()).any())
