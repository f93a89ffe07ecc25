"""Batches: the schedule of a run, the samples that each rank computes in each step, and their tensors.

Every rank calls these functions with the same arguments except its rank, and gets as many batches, of the
same sizes, as the others: a rank with one more step would wait forever.
"""

from __future__ import annotations

import math
import pickle
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.groups import Grouped
from ..data.tokens import Ints
from .options import TrainOptions
from .state import TrainContext
from .task import Loaded, Samples, Task

Indices = NDArray[np.int64]

GROUPS, LARGEST_GROUP, SMALLEST_GROUP = 4, 200, 50
"""Samples are sorted by length within groups of this many global batches: larger ones need less padding, and
several are needed for batches that differ from epoch to epoch."""
ALIGN = 2
"""Batches are padded to a multiple of this many tokens: AMX multiplies bf16 numbers in pairs. With 8, batches
of texts with 15 tokens would have a fifth more."""


def steps_per_epoch(count: int, batch_size: int, ranks: int) -> int:
    """Return the number of batches in one epoch of :func:`global_batches`."""
    return -(-_share(count, ranks) // batch_size)


def global_batches(
    lengths: Ints, batch_size: int, ranks: int, seed: tuple[int, ...], spread: int = 1
) -> list[Indices]:
    """Return all ranks' batches of one epoch, as indices: random, with similar lengths in a batch.

    The ranks' batches of a step are dealt (:func:`deal`) from samples of similar length, so that no rank
    waits long for another. If the samples don't divide evenly, the first ones come twice. Neighbors by length
    are spread over at least so many batches, if there are as many. An incomplete batch has random samples.
    """
    random = np.random.default_rng(seed)
    order = np.resize(random.permutation(len(lengths)), _share(len(lengths), ranks) * ranks)
    step = batch_size * ranks
    pieces = []
    size = step * min(LARGEST_GROUP, max(SMALLEST_GROUP, len(order) // step // GROUPS))
    for first in range(0, len(order), size):
        group = order[first : first + size]
        whole = len(group) // step
        # An incomplete batch stays random: the shortest samples may all have one text, or one label.
        group, rest = np.split(group, [whole * step])
        group = group[np.argsort(-lengths[group], kind="stable")]
        ends = np.linspace(0, whole, max(1, whole // spread) + 1).astype(int)
        for begin, end in pairwise(ends):
            window = group[begin * step : end * step]
            pieces += [window[n :: end - begin] for n in range(end - begin)]
        if len(rest):
            pieces.append(rest)
    return [pieces[index] for index in random.permutation(len(pieces))]


def deal(chosen: Indices, lengths: Ints, ranks: int, most: int) -> list[Indices]:
    """Return every rank's part of a step's samples: of similar lengths, at least one, and at most ``most``.

    The slowest rank has as few tokens, with padding, as possible: fewer long samples than others short ones.
    """
    order = chosen[np.argsort(-lengths[chosen], kind="stable")]
    count = len(order)
    if not ranks < count < most * ranks:
        return np.array_split(order, ranks)
    # Not one if there are more: it would be compiled separately.
    least = max(1, min(2, count // ranks))
    sizes = np.maximum(lengths[order], 1).tolist()

    def cut(limit: int) -> list[int]:
        ends = [0]
        for left in reversed(range(ranks)):
            begin = ends[-1]
            fitting = min(limit // sizes[begin], most, count - begin - left * least)
            ends.append(begin + max(least, fitting))
        return ends

    best = bisect_left(range(sizes[0] * most), True, key=lambda each: cut(each)[-1] == count)
    return [order[begin:end] for begin, end in pairwise(cut(best))]


def _share(count: int, ranks: int) -> int:
    """Return the samples per rank and epoch, the same for all ranks."""
    return -(-count // ranks)


def pad_inputs(samples: Sequence[Any], pad_token: int) -> dict[str, torch.Tensor]:
    """Return the samples' ``inputs`` for a model, shape (samples, tokens), padded at the end."""
    width = padded_width(samples)
    shape = (len(samples), width)
    batch = {name: np.zeros(shape, dtype=np.int64) for name in samples[0].inputs}
    batch["input_ids"].fill(pad_token)
    batch["attention_mask"] = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        batch["attention_mask"][row, : len(sample)] = 1
        for name, values in sample.inputs.items():
            batch[name][row, : len(sample)] = values
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def padded_width(samples: Sequence[Any]) -> int:
    """Return the number of tokens of the longest sample, aligned."""
    return -(-max(map(len, samples)) // ALIGN) * ALIGN


def trim(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch, or rows of one, without unneeded padding."""
    if "attention_mask" not in tensors:
        return tensors
    shape = tensors["attention_mask"].shape
    longest = int(tensors["attention_mask"].sum(dim=-1).max())
    width = -(-longest // ALIGN) * ALIGN
    return {
        # Only integers: a row of probabilities may have the same length as a text.
        name: each[..., :width].contiguous()
        if each.shape == shape and not each.is_floating_point()
        else each
        for name, each in tensors.items()
    }


class SampleList(list[Any]):
    """A few samples as :class:`.task.Samples`."""

    @property
    def lengths(self) -> Ints:
        """The length of every sample."""
        return np.array([len(each) for each in self], dtype=np.int32)

    def token_ids(self) -> None:
        """Return None: samples of any kind may have no tokens."""

    def digest(self) -> str:
        """Return a digest of the pickled samples."""
        return blake2b(pickle.dumps(list(self), protocol=4), digest_size=16).hexdigest()


class StepBatch(NamedTuple):
    """One rank's part of a step: its tensors and its samples' weights in the loss.

    ``total`` is the weight of all ranks' samples. ``tokens`` counts this rank's, ``padded`` with padding.
    """

    tensors: dict[str, torch.Tensor]
    weights: Sequence[float]
    total: float
    tokens: int
    padded: int

    def __len__(self) -> int:
        return len(self.weights)

    def split(self, parts: int) -> list[tuple[dict[str, torch.Tensor], float]]:
        """Split into at most ``parts`` parts with their weights, each as narrow as its longest sample."""
        if parts == 1:
            return [(self.tensors, sum(self.weights))]
        rows = -(-len(self) // parts)
        columns = {name: torch.split(values, rows) for name, values in self.tensors.items()}
        return [
            (
                trim({name: each[number] for name, each in columns.items()}),
                sum(self.weights[first : first + rows]),
            )
            for number, first in enumerate(range(0, len(self), rows))
        ]


@dataclass(frozen=True)
class Taught:
    """A teacher's outputs for the training samples, or for their parts; ``digest`` tells where from."""

    outputs: NDArray[Any]
    digest: str

    def pick(self, samples: Any, chosen: NDArray[Any]) -> Tensor:
        """Return those for some samples, with one row each, or one for each of their parts."""
        if not isinstance(samples, Grouped):
            return torch.from_numpy(self.outputs[chosen])
        parts = (torch.from_numpy(self.outputs[samples.texts_of(n)]) for n in chosen)
        return pad_sequence([*parts], batch_first=True)


@dataclass(frozen=True)
class TrainingRun:
    """A task's run on this rank: the inputs of its steps."""

    context: TrainContext
    task: Task[Any]
    loaded: Loaded
    samples: Samples
    taught: Taught | None = None

    def digest(self) -> str:
        """Return a digest of what the model learns."""
        return self.samples.digest() + (f" {self.taught.digest}" if self.taught else "")

    @cached_property
    def lengths(self) -> Ints:
        """Every sample's number of tokens, which :class:`.task.Samples` may compute on access."""
        return self.samples.lengths

    @cached_property
    def _weights(self) -> NDArray[Any]:
        found = self.task.weights(self.samples)
        return np.ones(len(self.samples), dtype=np.int64) if found is None else found

    def batch(self, chosen: Indices) -> StepBatch:
        """Return this rank's part of a step; ``chosen`` are the samples of all ranks."""
        ranks = self.context.ranks
        most = -(-self.context.options.batch_size * ranks.planned // ranks.size)
        own = deal(chosen, self.lengths, ranks.size, most)[ranks.rank]
        tensors = self.task.collate([self.samples[int(index)] for index in own], self.loaded)
        if self.taught:
            tensors["teacher"] = self.taught.pick(self.samples, own)
        tokens = int(self.lengths[own].sum())
        ids = tensors.get("input_ids")
        padded = tokens if ids is None else ids.numel()
        weights = self._weights[own].tolist()
        total = self._weights[chosen].sum().item() or 1  # samples may have no labels
        return StepBatch(tensors, weights, total, tokens, padded)


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of one run, the same number on every rank."""

    per_epoch: int
    total: int
    warmup: int
    shape: str = "linear"
    """The rate after the warm-up, as in ``--lr-schedule``."""

    def rate(self, step: int) -> float:
        """Return the fraction of the peak learning rate for a step (from 0); always above 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = max(self.total - step, 1) / (self.total - self.warmup)
        if self.shape == "cosine":
            return (1 - math.cos(math.pi * left)) / 2
        return 1.0 if self.shape == "constant" else left


def plan_schedule(options: TrainOptions, samples: int, ranks: int) -> Schedule:
    """Return the schedule of a run."""
    per_epoch = steps_per_epoch(samples, options.batch_size, ranks)
    total = per_epoch * options.epochs
    if options.max_steps is not None:
        total = min(total, options.max_steps)
    # At most total - 1: the last step must not divide by zero.
    warmup = min(math.ceil(total * options.warmup_ratio), total - 1)
    return Schedule(per_epoch, total, warmup, options.lr_schedule)


def batches(context: TrainContext, lengths: Ints, schedule: Schedule) -> Iterator[Indices]:
    """Yield all ranks' samples of each step of the schedule, as indices.

    With fewer ranks than planned, these share the same samples per step.
    """
    options, ranks = context.options, context.ranks
    for first in range(0, schedule.total, schedule.per_epoch):
        seed = (options.seed, first)
        epoch = global_batches(
            lengths, options.batch_size, ranks.planned, seed, options.batches_sharing_lengths
        )
        yield from epoch[: schedule.total - first]
