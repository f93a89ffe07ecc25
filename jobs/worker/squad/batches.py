"""Which features each rank computes in each step, and how a batch becomes tensors.

Every rank calls these functions with the same arguments but its own rank, and gets batches of the
same number and sizes as the others: a rank with one step more would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .features import Feature, Ints

Indices = NDArray[np.int64]

GROUP = 50
"""Global batches among which features are sorted by length. Larger: less padding, less chance."""
ALIGN = 8
"""Batches are padded to a multiple of so many tokens, so that oneDNN meets few different shapes."""


def steps_per_epoch(count: int, batch_size: int, ranks: int) -> int:
    """How many batches of :func:`epoch_batches` make an epoch."""
    return -(-_share(count, ranks) // batch_size)


def epoch_batches(
    lengths: Ints, batch_size: int, rank: int, ranks: int, seed: tuple[int, ...]
) -> list[Indices]:
    """One rank's batches of one epoch, as indices: random, but alike in length inside a batch.

    All ranks' batches of one step are dealt from the same features of similar length, so that no
    rank waits long for another. Where the features can't be divided, the first ones come twice.
    """
    random = np.random.default_rng(seed)
    order = np.resize(random.permutation(len(lengths)), _share(len(lengths), ranks) * ranks)
    step = batch_size * ranks
    pieces = []
    for first in range(0, len(order), step * GROUP):
        group = order[first : first + step * GROUP]
        group = group[np.argsort(-lengths[group], kind="stable")]
        pieces += [group[begin : begin + step] for begin in range(0, len(group), step)]
    return [pieces[index][rank::ranks] for index in random.permutation(len(pieces))]


def _share(count: int, ranks: int) -> int:
    """Features per rank and epoch: the same for all."""
    return -(-count // ranks)


def collate(features: Sequence[Feature], pad_token: int) -> dict[str, torch.Tensor]:
    """A batch as the model takes it, shape (features, tokens), padded at the end."""
    width = -(-max(map(len, features)) // ALIGN) * ALIGN
    shape = (len(features), width)
    batch = {name: np.zeros(shape, dtype=np.int64) for name in features[0].inputs}
    batch["input_ids"].fill(pad_token)
    batch["attention_mask"] = np.zeros(shape, dtype=np.int64)
    for row, feature in enumerate(features):
        batch["attention_mask"][row, : len(feature)] = 1
        for name, values in feature.inputs.items():
            batch[name][row, : len(feature)] = values
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def trim(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch, or some rows of one, without the padding that no row of it needs."""
    longest = int(tensors["attention_mask"].sum(dim=1).max())
    width = -(-longest // ALIGN) * ALIGN
    return {name: each[:, :width] if each.dim() == 2 else each for name, each in tensors.items()}


def label(features: Sequence[Feature]) -> dict[str, torch.Tensor]:
    """The answers' first and last tokens, shape (features,), for the model to compute its loss."""
    return {
        "start_positions": torch.tensor([feature.start for feature in features]),
        "end_positions": torch.tensor([feature.end for feature in features]),
    }
