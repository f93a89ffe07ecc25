"""How well anchors find their positives among all candidates, and the vectors of texts by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...data.groups import FlatTexts, Grouped
from ...data.tokens import Longs, TextSamples
from ...training.batches import pad_inputs
from ...training.evaluation import compute_together, in_order
from ...training.scores import Ranked, rank_candidates
from ...training.state import TrainContext
from ...training.task import Loaded
from .options import FOUND_AT


class Corpus(NamedTuple):
    """Passages that are candidates in addition to those of the evaluation data."""

    texts: Sequence[str]
    samples: TextSamples
    digests: Longs


def digest_texts(texts: Sequence[str]) -> Longs:
    """Return a number for each text, the same on all ranks."""
    digests = (blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), dtype="<i8")


def _encode(
    context: TrainContext,
    loaded: Loaded,
    samples: TextSamples,
    places: Longs,
    use: Callable[[Longs, NDArray[np.float32]], Any],
) -> list[Any]:
    """Return what ``use`` makes of the texts at some places, with their vectors, on all ranks."""

    def encode(batches: Sequence[Longs]) -> Iterator[Any]:
        loaded.model.eval()
        with torch.inference_mode(), context.autocast():
            for chosen in batches:
                rows = [samples[int(each)] for each in places[chosen]]
                yield use(chosen, loaded.model.encode(**pad_inputs(rows, loaded.pad_token)).numpy())

    return compute_together(context.ranks, samples.lengths[places], encode)


def encode_together(
    context: TrainContext, loaded: Loaded, samples: TextSamples, places: Longs
) -> NDArray[np.float32]:
    """Return the vectors of the texts at these places, computed by all ranks."""
    return in_order(_encode(context, loaded, samples, places, lambda *part: part))


def _search(
    context: TrainContext,
    loaded: Loaded,
    samples: TextSamples,
    places: Longs,
    anchors: NDArray[np.float32],
    known: Ranked,
    first: int,
    same: Longs,
) -> Ranked:
    """Return what is known with the texts at these places, which are numbered from ``first``, as candidates.

    ``same`` is which of them is the anchor's own text, or -1. Each rank compares its own batches. No rank has
    all vectors.
    """
    own = known._replace(places=np.zeros_like(known.places))
    columns = np.full(len(places) + 1, -1)  # of a batch; the last is for -1

    def compare(chosen: Longs, vectors: NDArray[np.float32]) -> None:
        nonlocal own
        columns[chosen] = np.arange(len(chosen))
        found = rank_candidates(anchors, vectors, limits=known.limits, own=columns[same])
        columns[chosen] = -1
        own = own.merge(found._replace(best=first + chosen[found.best]))

    _encode(context, loaded, samples, places, compare)
    return reduce(Ranked.merge, context.ranks.gather(own), known)


def _find(known: Longs, wanted: Longs) -> Longs:
    """Return the places of numbers among sorted ones; -1 for those that are missing."""
    return np.where(np.isin(wanted, known), np.searchsorted(known, wanted), -1)


def evaluate(
    context: TrainContext, loaded: Loaded, texts: FlatTexts, samples: Grouped, corpus: Corpus | None
) -> dict[str, Any]:
    """Return the figures of the groups of these texts, which have no prompts, on rank 0."""
    firsts = samples.bounds[:-1]
    pairs = np.unique(np.stack([samples.numbers[firsts + place] for place in (0, 1)]), axis=1)
    anchors, starts, rows = np.unique(pairs[0], return_index=True, return_inverse=True)
    candidates = np.unique(np.delete(samples.numbers, firsts))
    vectors = encode_together(context, loaded, samples.parts, samples.first)
    queries, names = vectors[pairs[0]], samples.first[candidates]
    columns = np.full(len(samples.first), -1)
    columns[samples.same[candidates]] = np.arange(len(candidates))
    own = np.where(np.equal(*samples.same[pairs]), -1, columns[samples.same[pairs[0]]])
    wanted = np.searchsorted(candidates, pairs[1])
    ranked = rank_candidates(queries, vectors[candidates], wanted, own=own)
    more: Longs = np.zeros(0, dtype=np.int64)
    if corpus:
        digests, distinct = np.unique(corpus.digests, return_index=True)
        known = digest_texts(texts)
        is_new = ~np.isin(digests, known[names])
        more, same = distinct[is_new], _find(digests[is_new], known[samples.first[pairs[0]]])
        ranked = _search(context, loaded, corpus.samples, more, queries, ranked, len(names), same)
    if not context.ranks.first:
        return {}
    places, best = np.split(ranked.places, starts[1:]), ranked.best[starts]
    reached = np.array([each.min() for each in places])
    shown = [*texts]

    def text_of(candidate: int) -> str:
        if candidate < len(names):
            return str(shown[names[candidate]])
        assert corpus is not None
        return corpus.texts[int(more[candidate - len(names)])]

    predictions = [
        {
            "anchor": shown[samples.first[anchor]],
            "rank": int(place),
            "best": text_of(int(found)),
            **({"ranks": own.tolist()} if len(own) > 1 else {}),
        }
        for anchor, own, place, found in zip(anchors, places, reached, best, strict=True)
    ]
    recall = {
        f"recall_at_{most}": np.bincount(rows, ranked.places <= most) / np.bincount(rows)
        for most in FOUND_AT
    }
    scores = {**recall, "mrr": 1 / reached}
    return {
        "predictions": predictions,
        **{name: round(100 * float(each.mean()), 3) for name, each in scores.items()},
        "anchors": len(anchors),
        "candidates": len(names) + len(more),
    }
