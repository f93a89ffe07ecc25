"""The loss of labels with weights and smoothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def mean_loss(
    logits: Tensor, labels: Tensor, weights: Sequence[float] | None, smoothing: float
) -> Tensor:
    """Return the mean cross-entropy by the weights of the labels' classes; labels below 0 don't count.

    ``logits`` have shape (labels, classes). Without labels, it is 0, where transformers' own is not a number.
    """
    of_class = None if weights is None else torch.tensor(weights)
    # torch ignores -100, which is what tasks use.
    total = cross_entropy(
        logits.float(), labels, of_class, reduction="sum", label_smoothing=smoothing
    )
    known = labels[labels >= 0]
    if of_class is None:
        return total / max(len(known), 1)
    return total / of_class[known].sum() if len(known) else total
