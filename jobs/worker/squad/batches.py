"""Batches: the features that each rank computes in each step, and their tensors.

Every rank calls these functions with the same arguments except its rank, and gets as many batches, of the
same sizes, as the others: a rank with one more step would wait forever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .features import Feature, Ints

Indices = NDArray[np.int64]

GROUP = 50
"""Global batches among which features are sorted by length. More means less padding, less random."""
ALIGN = 8
"""Batches are padded to a multiple of this many tokens, so that oneDNN sees few shapes."""


def steps_per_epoch(count: int, batch_size: int, ranks: int) -> int:
    """Return the number of batches in one epoch of :func:`epoch_batches`."""
    return -(-_share(count, ranks) // batch_size)


def epoch_batches(
    lengths: Ints, batch_size: int, rank: int, ranks: int, seed: tuple[int, ...]
) -> list[Indices]:
    """Return one rank's batches of one epoch, as indices; see :func:`global_batches`."""
    return [batch[rank::ranks] for batch in global_batches(lengths, batch_size, ranks, seed)]


def global_batches(
    lengths: Ints, batch_size: int, ranks: int, seed: tuple[int, ...]
) -> list[Indices]:
    """Return all ranks' batches of one epoch, as indices: random, but of similar length in a batch.

    The ranks' batches of a step are dealt from features of similar length, so that no rank waits long
    for another. If the features don't divide evenly, the first ones come twice.
    """
    random = np.random.default_rng(seed)
    order = np.resize(random.permutation(len(lengths)), _share(len(lengths), ranks) * ranks)
    step = batch_size * ranks
    pieces = []
    for first in range(0, len(order), step * GROUP):
        group = order[first : first + step * GROUP]
        group = group[np.argsort(-lengths[group], kind="stable")]
        pieces += [group[begin : begin + step] for begin in range(0, len(group), step)]
    return [pieces[index] for index in random.permutation(len(pieces))]


def _share(count: int, ranks: int) -> int:
    """Return the features per rank and epoch, the same for all ranks."""
    return -(-count // ranks)


def collate(features: Sequence[Feature], pad_token: int) -> dict[str, torch.Tensor]:
    """Return a batch for the model, shape (features, tokens), padded at the end."""
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
    """Return a batch, or some rows of one, without the padding that none of its rows needs."""
    longest = int(tensors["attention_mask"].sum(dim=1).max())
    width = -(-longest // ALIGN) * ALIGN
    return {name: each[:, :width] if each.dim() == 2 else each for name, each in tensors.items()}


def label(features: Sequence[Feature]) -> dict[str, torch.Tensor]:
    """Return the answers' first and last tokens, shape (features,), for the model's loss."""
    return {
        "start_positions": torch.tensor([feature.start for feature in features]),
        "end_positions": torch.tensor([feature.end for feature in features]),
    }
