"""Scores of numbers, and of rankings: which candidates come before those that should be found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr

from ..data.groups import Group
from ..data.tokens import Longs

_RANKED_TOGETHER = 256
_GAINS_TO = 10


def score_numbers(
    records: Sequence[Any], found: NDArray[np.float32]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures, and a prediction for each row. Equal numbers do not correlate."""
    truth, own = np.array([each.score for each in records]), found.astype(float)
    varies = len({*truth.tolist()}) > 1 < len({*own.tolist()})
    figures = {
        name: round(100 * float(correlate(truth, own).statistic), 3) if varies else 0.0
        for name, correlate in (("spearman", spearmanr), ("pearson", pearsonr))
    }
    pairs = zip(truth.tolist(), own.tolist(), strict=True)
    rows = [{"score": score, "predicted": each} for score, each in pairs]
    return {**figures, "mse": round(float(np.mean((truth - own) ** 2)), 6)}, rows


def rank_candidates(
    anchors: NDArray[np.float32], candidates: NDArray[np.float32], rows: Longs, wanted: Longs
) -> tuple[Longs, Longs]:
    """Return the rank, from 1, of each pair's candidate for its anchor, and each anchor's best candidate.

    Vectors have shape (texts, size). Among candidates with equal scores, the wanted one is the last.
    """
    ranks = np.empty(len(rows), dtype=np.int64)
    best = np.empty(len(anchors), dtype=np.int64)
    for first in range(0, len(anchors), _RANKED_TOGETHER):
        scores = anchors[first : first + _RANKED_TOGETHER] @ candidates.T
        best[first : first + len(scores)] = scores.argmax(axis=1)
        for pair in np.flatnonzero((rows >= first) & (rows < first + len(scores))):
            own = scores[rows[pair] - first]
            ranks[pair] = np.count_nonzero(own >= own[wanted[pair]])
    return ranks, best


def score_rankings(
    records: Sequence[Group], found: NDArray[np.float32]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures, and for each query the best rank of a positive and the text that ranks first.

    A query's candidates are the texts of all its groups. Among equal ones, positives are the last.
    """
    queries: dict[str, dict[str, tuple[float, bool]]] = {}
    values = iter(found.tolist())
    for query, *texts in (each.texts for each in records):
        known = queries.setdefault(query, {})
        for text in texts:
            is_right = text == texts[0] or known.get(text, (0.0, False))[1]
            known[text] = (-next(values), is_right)
    rows, firsts, gains = [], [], []
    for query, known in queries.items():
        order = sorted(known, key=lambda text: known[text])
        places = [n for n, text in enumerate(order, start=1) if known[text][1]]
        rows.append({"query": query, "rank": places[0], "best": order[0]})
        firsts.append(1 / places[0])
        gains.append(_gain(places) / _gain(range(1, len(places) + 1)))
    figures = {"mrr": firsts, "ndcg_at_10": gains}
    means = {name: round(100 * sum(each) / len(rows), 3) for name, each in figures.items()}
    return {**means, "queries": len(rows)}, rows


def _gain(places: Sequence[int]) -> float:
    return sum(1 / math.log2(place + 1) for place in places if place <= _GAINS_TO)
