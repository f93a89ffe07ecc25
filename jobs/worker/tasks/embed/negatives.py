"""Hard negatives that the model itself finds: texts that it takes for an anchor's positive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...data.groups import Grouped
from ...data.tokens import Longs
from ...runtime.ranks import Ranks

MARGIN = 0.05
"""A text that is nearly as similar to the anchor as its positive, or more, may be right as well: at most
this part below the positive's similarity, as in https://arxiv.org/abs/2407.15831."""
_TOGETHER = 256


def mine(groups: Grouped, vectors: NDArray[np.float32], count: int, ranks: Ranks) -> Longs:
    """Return the numbers of up to ``count`` negatives for each group, the most similar first; -1 is none.

    ``vectors`` are those of all texts by number, with length 1. The candidates are the data's positives and
    negatives. Each rank does some of the work.
    """
    anchors, positives = (groups.numbers[groups.bounds[:-1] + place] for place in (0, 1))
    candidates = np.unique(np.delete(groups.numbers, groups.bounds[:-1]))
    same, right = groups.same[candidates], dict[int, list[int]]()
    for anchor, positive in zip(anchors.tolist(), positives.tolist(), strict=True):
        right.setdefault(anchor, []).append(positive)
    blocks = range(0, len(groups), _TOGETHER)
    parts = {}
    for begin in blocks[ranks.rank :: ranks.size]:
        scores = vectors[anchors[begin : begin + _TOGETHER]] @ vectors[candidates].T
        parts[begin] = np.full((len(scores), count), -1, dtype=np.int64)
        for row, own in enumerate(scores):
            group = begin + row
            limit = own[np.searchsorted(candidates, positives[group])]
            known = [*right[int(anchors[group])], *groups.texts_of(group)[1:].tolist()]
            own[np.searchsorted(candidates, known)] = -np.inf
            own[own > limit - MARGIN * abs(limit)] = -np.inf
            own[same == groups.same[anchors[group]]] = -np.inf  # its own text, with another prompt
            near = np.sort(np.argpartition(-own, min(count, len(own)) - 1)[:count])
            best = near[np.argsort(-own[near], kind="stable")]
            best = best[np.isfinite(own[best])]
            parts[begin][row, : len(best)] = candidates[best]
    every = {begin: part for share in ranks.gather(parts) for begin, part in share.items()}
    return np.concatenate([every[begin] for begin in blocks])


def add_negatives(groups: Grouped, mined: Longs) -> Grouped:
    """Return groups with more negatives: a row of numbers for each, -1 for none."""
    has = mined >= 0
    ends = np.repeat(groups.bounds[1:], has.sum(axis=1))
    numbers = np.insert(groups.numbers, ends, mined[has])
    bounds = groups.bounds + np.concatenate([[0], np.cumsum(has.sum(axis=1))])
    return replace(groups, numbers=numbers, bounds=bounds)
