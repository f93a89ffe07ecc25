"""The losses of `train embed`, over the texts of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import (
    cosine_similarity,
    cross_entropy,
    log_softmax,
    normalize,
    pad,
    softmax,
)

from ...runtime.ranks import Ranks

_NEVER = -1e9
"""The score of a candidate that does not count; a softmax makes it 0, without products of 0 and infinity."""


def compare(vectors: Tensor, numbers: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return each anchor's similarities to all ranks' candidates, and the place of its positive.

    ``numbers`` has a row for each sample: those of its anchor, its positive, and its negatives, equal for
    equal texts, and -1 for none. ``vectors`` are those of its columns, one after the other. A candidate that
    is right for another reason doesn't count: one with the positive's or the anchor's text, or the positive
    of an equal anchor.
    """
    count, anchors = len(numbers), numbers[:, :1]
    # With fewer ranks than planned, they differ.
    counts = [int(each) for (each,) in ranks.gather_later([len(vectors) - count])()]
    candidates = _Gather.apply(vectors[count:], counts, ranks)  # type: ignore[no-untyped-call]
    texts = numbers.T[1:][numbers.T[1:] >= 0]
    # The positives' anchors; negatives have none.
    owners = torch.full_like(texts, -1)
    owners[:count] = numbers[:, 0]
    known = _gather(torch.stack([texts, owners], dim=1), counts, ranks)
    is_same = (known[:, 0] == numbers[:, 1:2]) | (known.T[:, None] == anchors).any(0)
    right = sum(counts[: ranks.rank]) + torch.arange(count)
    is_same[torch.arange(count), right] = False
    with torch.autocast("cpu", enabled=False):  # bf16 has too few digits for similarities
        scores = vectors[:count] @ candidates.T
    return scores.masked_fill(is_same, _NEVER), right


def contrast(
    vectors: Tensor, numbers: Tensor, temperature: float, sizes: list[int], ranks: Ranks
) -> Tensor:
    """Return the mean loss of this rank's samples: each anchor has to find its positive.

    The candidates are the positives and negatives of all samples on all ranks (:func:`compare`). This is
    InfoNCE, https://arxiv.org/abs/1807.03748. The losses of the vectors' beginnings with these ``sizes`` are
    added, as in Matryoshka embeddings.
    """
    loss = torch.zeros(())
    for part in (vectors, *(normalize(vectors[:, :size], dim=-1) for size in sizes)):
        scores, right = compare(part, numbers, ranks)
        loss = loss + cross_entropy(scores / temperature, right)
    return loss


def follow(
    vectors: Tensor, teacher: Tensor, numbers: Tensor, temperature: float, ranks: Ranks
) -> Tensor:
    """Return the mean loss of samples against a teacher's vectors, which have shape (samples, texts, size).

    It is the distance of the vectors' directions or, for vectors of other sizes, the cross-entropy of how
    similar the candidates are for each anchor.
    """
    has = numbers.T >= 0
    wanted = teacher.transpose(0, 1)[has]
    if wanted.shape[1] == vectors.shape[1]:
        away = torch.zeros(has.shape).masked_scatter(has, 1 - cosine_similarity(vectors, wanted))
        return (away.sum(0) / has.sum(0)).mean()
    scores, _ = compare(vectors, numbers, ranks)
    known, _ = compare(wanted, numbers, ranks)
    soft = softmax(known / temperature, dim=1)
    return -(soft * log_softmax(scores / temperature, dim=1)).sum(1).mean()


def _gather(rows: Tensor, counts: list[int], ranks: Ranks) -> Tensor:
    """Return all ranks' rows, in rank order."""
    if ranks.size == 1:
        return rows
    most = max(counts)
    # All ranks have to send the same size.
    own = pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows))).contiguous()
    found = [torch.empty_like(own) for _ in counts]
    dist.all_gather(found, own, group=ranks.control)
    return torch.cat([each[:count] for each, count in zip(found, counts)])  # noqa: B905 - 3.8


class _Gather(torch.autograd.Function):
    """:func:`_gather`, with the gradients that all ranks' losses have for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], ranks: Ranks) -> Tensor:
        ctx.counts, ctx.ranks = counts, ranks
        return _gather(rows.contiguous(), counts, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        if ctx.ranks.size > 1:
            dist.all_reduce(total, group=ctx.ranks.control)
        first = sum(ctx.counts[: ctx.ranks.rank])
        return total[first : first + ctx.counts[ctx.ranks.rank]], None, None
