"""Ask a model every question of a data set, all ranks together.

The batches are the same whatever the number of ranks, and so is every number that a rank computes
from one of them: an evaluation on many ranks gives the very answers of one rank alone. (Ranks with
other numbers of threads may round otherwise.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from ..runtime.context import RankContext
from .batches import collate
from .dataset import Question
from .features import Features
from .model import Loaded
from .options import TrainOptions
from .preparing import prepare_features
from .spans import Floats, Spans, best_per_question, best_spans
from .tokens import Longs

BATCH_TOKENS = 4096
"""Tokens of a batch, padding included: enough to keep a processor busy, and few logits at a time."""
TALK_SECONDS = 60.0
"""So often the ranks say whether they are ready."""
FEWEST_BATCHES = 64
"""Of less data the batches are made smaller, so that many ranks get work of equal size."""


class Batch(NamedTuple):
    """A batch's windows, and the start and end logits of shape (windows, tokens)."""

    chosen: Longs
    start: Floats
    end: Floats


def predict(
    context: RankContext[TrainOptions],
    loaded: Loaded,
    questions: Sequence[Question],
    features: Features | None = None,
) -> dict[str, str]:
    """An answer for every question, by its id; the ranks share the work, and all get the result.

    ``features`` are the questions' own, where they were made before. A question that can't be asked
    (see ``--skip-bad-records``) has the answer "".
    """
    ranks = context.ranks
    if features is None:
        features = prepare_features(context, loaded, questions)
    mine = deal_batches(plan_batches(features), features, ranks.size)[ranks.rank]
    batches = run_batches(loaded, features, mine, context.autocast())
    parts: list[tuple[Longs, Spans]] = []
    # A rank that is ready must not wait longer than the others may be silent (see distributed).
    done = False
    while not all(ranks.gather(done)):
        until = time.monotonic() + TALK_SECONDS
        while not done and time.monotonic() < until:
            batch = next(batches, None)
            done = batch is None
            if batch is not None:
                spans = best_spans(batch.start, batch.end, features.take(batch.chosen))
                parts.append((batch.chosen, spans))
    gathered = [part for share in ranks.gather(parts) for part in share]
    return answers(questions, features, gathered)


def answers(
    questions: Sequence[Question], features: Features, parts: Sequence[tuple[Longs, Spans]]
) -> dict[str, str]:
    """Every question's answer, from all windows' best spans in whatever order."""
    if not parts:
        return {question.id: "" for question in questions}
    chosen = np.concatenate([indices for indices, _ in parts])
    spans = Spans.join([spans for _, spans in parts]).take(np.argsort(chosen))
    best = best_per_question(spans, features.windows.question, len(questions))
    return {
        question.id: question.context[spans.begin[window] : spans.end[window]]
        if window >= 0
        else ""
        for question, window in zip(questions, best, strict=True)
    }


def plan_batches(features: Features) -> list[Longs]:
    """All windows in batches of similar length, the longest first."""
    sizes = features.lengths.astype(np.int64)
    order = np.argsort(-sizes, kind="stable")
    if not len(order):
        return []
    budget = min(BATCH_TOKENS, max(int(sizes.sum()) // FEWEST_BATCHES, int(sizes.max())))
    batches, first = [], 0
    while first < len(order):
        # The first one is the longest, so its length is the batch's width.
        count = max(1, budget // int(sizes[order[first]]))
        batches.append(order[first : first + count])
        first += count
    return batches


def deal_batches(batches: Sequence[Longs], features: Features, ranks: int) -> list[list[Longs]]:
    """Every rank's batches: each one goes to the rank that has the fewest tokens until then."""
    sizes = features.lengths
    loads = [0] * ranks
    shares: list[list[Longs]] = [[] for _ in range(ranks)]
    for batch in batches:
        rank = loads.index(min(loads))
        loads[rank] += int(sizes[batch].max()) * len(batch)
        shares[rank].append(batch)
    return shares


def run_batches(
    loaded: Loaded,
    features: Features,
    batches: Sequence[Longs],
    autocast: AbstractContextManager[Any],
) -> Iterator[Batch]:
    """Each batch with the model's logits, one at a time."""
    loaded.model.eval()
    with torch.inference_mode(), autocast:
        for chosen in batches:
            output = loaded.model(**collate(features.take(chosen), loaded.pad_token))
            start, end = output.start_logits.float().numpy(), output.end_logits.float().numpy()
            yield Batch(chosen, start, end)
