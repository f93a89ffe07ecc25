"""The losses of labels with weights and smoothing, and of a teacher's outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    log_softmax,
)


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


def distill_loss(
    logits: Tensor, teacher: Tensor, temperature: float, weights: Tensor | None, *, several: bool
) -> Tensor:
    """Return the mean divergence of the teacher's probabilities from the student's, by the rows' weights.

    Both are softened by the temperature, and the loss is multiplied by its square, as in
    https://arxiv.org/abs/1503.02531. With ``several``, each class has its own probability.
    """
    own, wanted = logits.float() / temperature, teacher / temperature
    if several:
        rows = binary_cross_entropy_with_logits(own, wanted.sigmoid(), reduction="none").mean(1)
    else:
        pair = log_softmax(own, dim=1), log_softmax(wanted, dim=1)
        rows = kl_div(*pair, reduction="none", log_target=True).sum(1)
    kept = torch.ones_like(rows) if weights is None else weights
    return temperature**2 * (rows * kept).sum() / kept.sum()
