"""Evaluation: a model's answers to every question of a data set, by all ranks together.

The batches do not depend on the number of ranks, so many ranks give the same answers as one. (Ranks with
different numbers of threads may round differently.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from .batches import collate
from .dataset import Question
from .features import Features, prepare_features
from .model import Loaded
from .spans import Floats, Spans, best_per_question, best_spans
from .state import TrainContext
from .tokens import Longs

BATCH_TOKENS = 4096
"""Tokens of a batch, with padding: enough to keep a processor busy, with few logits at a time."""
TALK_SECONDS = 60.0
"""Time between two messages in which the ranks report whether they are done."""
FEWEST_BATCHES = 64
"""Small data is cut into at least this many batches, so that many ranks share it evenly."""


class Batch(NamedTuple):
    """A batch's windows, and the start and end logits of shape (windows, tokens)."""

    chosen: Longs
    start: Floats
    end: Floats


def predict(
    context: TrainContext,
    loaded: Loaded,
    questions: Sequence[Question],
    features: Features | None = None,
) -> dict[str, str]:
    """Return the answer to every question, by its ID, on all ranks.

    ``features`` are those of the questions, if they exist already. A question that was skipped (see
    ``--skip-bad-records``) has the answer "".
    """
    ranks = context.ranks
    if features is None:
        features = prepare_features(context, loaded.tokenizer, questions)
    mine = deal_batches(plan_batches(features), features, ranks.size)[ranks.rank]
    batches = run_batches(loaded, features, mine, context.autocast())
    parts: list[tuple[Longs, Spans]] = []
    # A rank that is done must not wait for longer than ranks.TIMEOUT without a message.
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
    """Return every question's answer, from all windows' best spans in any order."""
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
    """Return all windows in batches of similar length, the longest first."""
    sizes = features.lengths.astype(np.int64)
    order = np.argsort(-sizes, kind="stable")
    if not len(order):
        return []
    budget = min(BATCH_TOKENS, max(int(sizes.sum()) // FEWEST_BATCHES, int(sizes.max())))
    batches, first = [], 0
    while first < len(order):
        # The first one is the longest: its length is the batch's width.
        count = max(1, budget // int(sizes[order[first]]))
        batches.append(order[first : first + count])
        first += count
    return batches


def deal_batches(batches: Sequence[Longs], features: Features, ranks: int) -> list[list[Longs]]:
    """Return every rank's batches. Each batch goes to the rank with the fewest tokens so far."""
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
    """Yield each batch with the model's logits."""
    loaded.model.eval()
    with torch.inference_mode(), autocast:
        for chosen in batches:
            output = loaded.model(**collate(features.take(chosen), loaded.pad_token))
            start, end = output.start_logits.float().numpy(), output.end_logits.float().numpy()
            yield Batch(chosen, start, end)
