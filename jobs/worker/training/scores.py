"""Scores of numbers, and of rankings: which candidates come before those that should be found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr

from ..data.groups import Group
from ..data.tokens import Longs

_SCORES = 1 << 24
"""So many are in memory at a time."""
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


class Ranked(NamedTuple):
    """Each anchor's candidates: how many have a score of at least ``limits``, and the best one's number."""

    limits: NDArray[np.float32]
    places: Longs
    best: Longs
    highest: NDArray[np.float32]

    def merge(self, other: Ranked) -> Ranked:
        """Return the same with the candidates of both; among equally good ones, the first is the best."""
        tie, lower = other.highest == self.highest, other.best < self.best
        best = np.where((other.highest > self.highest) | tie & lower, other.best, self.best)
        highest = np.maximum(self.highest, other.highest)
        return Ranked(self.limits, self.places + other.places, best, highest)


def rank_candidates(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32],
    wanted: Any = None,
    limits: NDArray[np.float32] | None = None,
    own: Any = None,
) -> Ranked:
    """Rank each anchor's ``wanted`` candidate, from 1, or count the candidates that reach its limit.

    Vectors have shape (texts, size). Among candidates with equal scores, the wanted one is the last. An
    anchor's ``own`` text, a candidate or -1, does not count.
    """
    parts, size = [], max(1, _SCORES // len(candidates))
    for first in range(0, len(anchors), size):
        part = slice(first, first + size)
        scores = anchors[part] @ candidates.T
        rows = np.arange(len(scores))
        if own is not None:
            scores[rows, own[part]] = np.where(own[part] < 0, scores[:, -1], -np.inf)
        best = scores.argmax(axis=1)
        least = scores[rows, wanted[part]] if limits is None else limits[part]
        places = np.count_nonzero(scores >= least[:, None], axis=1)
        parts.append((least, places, best, scores[rows, best]))
    return Ranked(*map(np.concatenate, zip(*parts, strict=True)))


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
