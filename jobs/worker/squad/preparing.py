"""Tokenization as all ranks share it: once for the whole cluster, and not again next time."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..runtime.context import RankContext
from ..runtime.errors import DatasetError, first_line
from ..runtime.ranks import Ranks
from .dataset import Question, skip_note
from .features import Features, cut_windows
from .model import Loaded
from .options import NO_CACHE, TrainOptions
from .token_cache import TokenCache, token_key
from .tokens import Encoded, Texts, collect_texts, encode, join_tokens


def prepare_features(
    context: RankContext[TrainOptions], loaded: Loaded, questions: Sequence[Question]
) -> Features:
    """All windows of the questions, the same on all ranks; raises :class:`DatasetError`."""
    options, events = context.options, context.events
    texts = collect_texts(questions)
    cache = None if options.token_cache == NO_CACHE else TokenCache(options.token_cache)
    encoded = encode_together(context.ranks, texts, loaded.tokenizer, cache, events.note)
    skipped: list[DatasetError] | None = [] if options.skip_bad_records else None
    size = options.max_length, options.stride
    features = cut_windows(questions, texts, encoded, loaded.tokenizer, size, skipped)
    if skipped:
        events.note(skip_note(skipped))
    return features


def encode_together(
    ranks: Ranks,
    texts: Texts,
    tokenizer: Any,
    cache: TokenCache | None,
    note: Callable[[str], None],
) -> Encoded:
    """The tokens of all texts, on every rank: from its node's cache, or each rank makes its share.

    Where one node lacks them all ranks work, for they would have to wait for it anyway.
    """
    key = token_key(texts, tokenizer)
    found = cache.load(key) if cache else None
    known: list[tuple[str, bool]] = ranks.gather((socket.gethostname(), found is not None))
    if found is not None and all(there for _, there in known):
        return found
    parts: list[Encoded] = ranks.gather(encode(share_texts(texts, ranks), tokenizer))
    passages, questions = (join_tokens(side) for side in zip(*parts, strict=True))
    encoded = Encoded(passages, questions)
    hosts = [host for host, _ in known]
    if cache and hosts.index(hosts[ranks.rank]) == ranks.rank:  # the first rank of its node
        try:
            cache.store(key, encoded)
        except OSError as error:
            note(f"tokens are not kept for the next job: {first_line(error)}")
    return encoded


def share_texts(texts: Texts, ranks: Ranks) -> Texts:
    """One rank's part of the texts: all parts in rank order are all texts, of about equal size."""
    passages, questions = (
        part[slice(*_bounds(part, ranks))] for part in (texts.passages, texts.questions)
    )
    return Texts(passages, questions, texts.passage_of)


def _bounds(texts: Sequence[str], ranks: Ranks) -> tuple[int, int]:
    ends = np.cumsum([len(text) for text in texts])
    shares = [ends[-1] * rank / ranks.size for rank in (ranks.rank, ranks.rank + 1)]
    first, last = np.searchsorted(ends, shares)
    return int(first), len(texts) if ranks.rank + 1 == ranks.size else int(last)
