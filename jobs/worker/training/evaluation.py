"""Evaluation: a model's outputs for every sample of a data set, by all ranks together.

The batches do not depend on the number of ranks, so many ranks give the same outputs as one. (Ranks with
different numbers of threads may round differently.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.tokens import Ints, Longs
from ..runtime.precision import autocast, choose_here
from ..runtime.ranks import Ranks
from .batches import pad_inputs
from .model import reading_limit
from .task import Loaded, Samples

BATCH_TOKENS = 4096
"""Tokens of a batch, with padding: enough to keep a processor busy, with few logits at a time."""
TALK_SECONDS = 60.0
"""Time between two messages in which the ranks report whether they are done."""
FEWEST_BATCHES = 64
"""Small data is cut into at least this many batches, so that many ranks share it evenly."""
LEAST_TOKENS = 512
"""Fewer tokens take about as long: all weights are read for them."""

Output = TypeVar("Output")


def compute_together(
    ranks: Ranks,
    lengths: Ints,
    compute: Callable[[Sequence[Longs]], Iterator[Output]],
) -> list[Output]:
    """Return what ``compute`` yields for every batch of the samples, of all ranks, in any order.

    Each rank calls it with its own batches of :func:`plan_batches`, which are indices of samples.
    """
    own = compute(deal_batches(plan_batches(lengths), lengths, ranks.size)[ranks.rank])
    parts = list[Output]()
    # A rank that is done must not wait for longer than ranks.TIMEOUT without a message.
    done = False
    while not all(ranks.gather(done)):
        until = time.monotonic() + TALK_SECONDS
        while not done and time.monotonic() < until:
            try:
                parts.append(next(own))
            except StopIteration:
                done = True
    return [part for share in ranks.gather(parts) for part in share]


def plan_batches(lengths: Ints, fewest: int = FEWEST_BATCHES, least: int = 0) -> list[Longs]:
    """Return all samples, as indices, in batches of similar length, the longest first.

    ``least`` is a number of tokens, with padding, that needs no second batch.
    """
    sizes = lengths.astype(np.int64)
    order = np.argsort(-sizes, kind="stable")
    if not len(order):
        return []
    budget = min(BATCH_TOKENS, max(int(sizes.sum()) // fewest, int(sizes.max()), least))
    batches, first = [], 0
    while first < len(order):
        # The first one is the longest: its length is the batch's width.
        count = max(1, budget // int(sizes[order[first]]))
        batches.append(order[first : first + count])
        first += count
    return batches


def deal_batches(batches: Sequence[Longs], lengths: Ints, ranks: int) -> list[list[Longs]]:
    """Return every rank's batches. Each batch goes to the rank with the fewest tokens so far."""
    loads = [0] * ranks
    shares: list[list[Longs]] = [[] for _ in range(ranks)]
    for batch in batches:
        rank = loads.index(min(loads))
        loads[rank] += int(lengths[batch].max()) * len(batch)
        shares[rank].append(batch)
    return shares


def run_batches(
    loaded: Loaded,
    samples: Samples,
    batches: Sequence[Longs],
    autocast: AbstractContextManager[Any],
) -> Iterator[tuple[Longs, Any]]:
    """Yield each batch with the model's output, for samples whose ``inputs`` are tokens."""
    loaded.model.eval()
    with torch.inference_mode(), autocast:
        for chosen in batches:
            rows = [samples[int(index)] for index in chosen]
            yield chosen, loaded.model(**pad_inputs(rows, loaded.pad_token))


def compute_logits(
    ranks: Ranks, loaded: Loaded, samples: Samples, autocast: AbstractContextManager[Any]
) -> NDArray[np.float32]:
    """Return the model's logits for all samples, in their order, computed by all ranks."""

    def compute(batches: Sequence[Longs]) -> Iterator[tuple[Longs, NDArray[np.float32]]]:
        for chosen, output in run_batches(loaded, samples, batches, autocast):
            yield chosen, output.logits.float().numpy()

    return in_order(compute_together(ranks, samples.lengths, compute))


def in_order(parts: Sequence[tuple[Longs, NDArray[np.float32]]]) -> NDArray[np.float32]:
    """Return the rows of all parts by the numbers of their samples."""
    order = np.argsort(np.concatenate([chosen for chosen, _ in parts]))
    return np.concatenate([rows for _, rows in parts])[order]


def run_texts(
    loaded: Loaded,
    texts: Sequence[Sequence[str]],
    read: Callable[[dict[str, torch.Tensor], Any], Iterable[Output]],
    *,
    offsets: bool = False,
) -> list[Output]:
    """Return what ``read`` finds for each text, or pair, in a batch's tokens and the model's output.

    Texts of similar length share a batch: beside a long one, short ones would take as long as it does.
    What is beyond :func:`.model.reading_limit` is cut off, and ``loaded.cut`` counts these texts.
    """
    if not texts:
        return []
    kinds = {*map(len, texts)}
    if len(kinds) > 1:  # the tokenizer takes either texts or pairs
        parts = [[each for each in texts if len(each) == kind] for kind in kinds]
        outputs = (iter(run_texts(loaded, part, read, offsets=offsets)) for part in parts)
        by_kind = dict(zip(kinds, outputs, strict=True))
        return [next(by_kind[len(each)]) for each in texts]
    size, found = reading_limit(loaded), dict[int, Output]()
    loaded.model.eval()
    loaded.tokenizer.truncation_side = "right"  # as in training
    columns = map(list, zip(*texts, strict=True))
    tokens = loaded.tokenizer(
        *columns,
        truncation=True,
        max_length=size,
        return_attention_mask=True,  # not all tokenizers do by default
        return_offsets_mapping=offsets,
    )
    if loaded.cut is not None:
        loaded.cut[size] += sum(bool(each.overflowing) for each in tokens.encodings)
    lengths = np.array([min(round_up(len(each)), size) for each in tokens["input_ids"]])
    fill = {"input_ids": loaded.pad_token, "offset_mapping": (0, 0)}
    with torch.inference_mode(), autocast(choose_here()):
        for chosen in plan_batches(lengths, fewest=1, least=LEAST_TOKENS):
            width = int(lengths[chosen].max())
            batch = {
                name: torch.tensor(
                    [rows[n] + [fill.get(name, 0)] * (width - len(rows[n])) for n in chosen]
                )
                for name, rows in tokens.items()
            }
            inputs = {name: batch[name] for name in batch if name != "offset_mapping"}
            found |= zip(chosen.tolist(), read(batch, loaded.model(**inputs)), strict=True)
    return [found[n] for n in range(len(texts))]


def round_up(width: int) -> int:
    """Return a number of tokens that is at most an eighth larger, and is the same for similar ones.

    For each shape of input that a process has not seen before, oneDNN generates code, which it keeps: up to
    2 MB per shape (MiniLM). A server would grow by a gigabyte.
    """
    step: int = 1 << max(0, width.bit_length() - 4)
    return -(-width // step) * step
