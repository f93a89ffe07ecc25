"""Texts, or pairs of texts, as samples: assembled on access from their tokens, cut to the longest input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from .tokens import Ints, Template, Tokens


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
    """Samples of one text each, or of two. ``targets`` has an entry per sample."""

    columns: Sequence[Tokens]
    template: Template
    targets: Sequence[Any]
    max_length: int

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def room(self) -> int:
        """The most tokens of texts in a sample."""
        return self.max_length - self.template.specials

    def with_targets(self, targets: Sequence[Any]) -> TextSamples:
        """Return the samples with other targets: an array has an entry per token of a single text."""
        return replace(self, targets=targets)

    @property
    def lengths(self) -> Ints:
        """Every sample's number of tokens, with special tokens."""
        specials = self.template.specials
        counts = sum(column.counts for column in self.columns)
        return np.minimum(counts + specials, self.max_length).astype(np.int32)

    def __getitem__(self, index: int) -> TextSample:
        texts = [column.ids[slice(*column.bounds[index : index + 2])] for column in self.columns]
        room, target = self.room, self.targets[index]
        if len(texts) == 2:  # each keeps its half, and what the other does not need
            kept = max(room // 2, room - len(texts[1]))
            texts = [texts[0][:kept], texts[1]]
            room -= len(texts[0])
        texts[-1] = texts[-1][:room]
        inputs = self.template.join(*texts)
        if isinstance(target, np.ndarray):
            target = target[:room]
        return TextSample(inputs, target, len(self.template.prefix))

    def digest(self) -> str:
        """Return a digest of all samples."""
        found = blake2b(digest_size=16)
        for index in range(len(self)):
            sample = self[index]
            found.update(sample.inputs["input_ids"].tobytes())
            target = sample.target
            found.update(
                f"{target.tolist() if isinstance(target, np.ndarray) else target};".encode()
            )
        return found.hexdigest()
