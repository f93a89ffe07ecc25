from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from jobs.worker.data.tokens import Ints
from jobs.worker.tasks.squad.features import Feature
from jobs.worker.tasks.squad.task import DEMO
from jobs.worker.training.batches import (
    ALIGN,
    Indices,
    Schedule,
    StepBatch,
    deal,
    global_batches,
    pad_inputs,
    plan_schedule,
    steps_per_epoch,
)


def some_lengths(count: int) -> Ints:
    return np.random.default_rng(1).integers(20, 384, count).astype(np.int32)


def epoch_batches(
    lengths: Ints, batch_size: int, rank: int, ranks: int, seed: tuple[int, ...], spread: int = 1
) -> list[Indices]:
    """Return one rank's batches of one epoch."""
    every = global_batches(lengths, batch_size, ranks, seed, spread)
    return [deal(batch, lengths, ranks, batch_size)[rank] for batch in every]


@pytest.mark.parametrize("count", [1, 2, 7, 16, 97, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_all_ranks_take_equal_steps_and_cover_all_features(count: int, ranks: int) -> None:
    sizes = some_lengths(count)
    for size, spread in product((1, 4, 16), (1, 8)):
        every = global_batches(sizes, size, ranks, (42, 0), spread)
        steps = [deal(batch, sizes, ranks, size) for batch in every]
        assert len(steps) == steps_per_epoch(count, size, ranks)
        for step in steps:
            assert len(step) == ranks
            assert all(1 <= len(batch) <= size for batch in step)
            if any(len(batch) == 1 for batch in step):
                assert sum(map(len, step)) < 2 * ranks, "one sample is compiled separately"
        seen = np.concatenate([batch for step in steps for batch in step])
        assert set(seen) == set(range(count))
        assert len(seen) - count < ranks, "only what can't be divided comes twice"


def test_batches_of_all_ranks_have_similar_lengths() -> None:
    sizes = some_lengths(1008)  # whole batches
    for step in zip(*(epoch_batches(sizes, 8, rank, 2, (1, 2)) for rank in (0, 1)), strict=True):
        together = sizes[np.concatenate(step)]
        assert together.max() - together.min() < 60


@pytest.mark.parametrize(("count", "most"), [(1_600, 0.12), (16_000, 0.06)])
def test_short_texts_have_little_padding_and_epochs_other_batches(count: int, most: float) -> None:
    sizes = np.clip(np.random.default_rng(1).lognormal(2.6, 0.5, count), 4, 128).astype(np.int32)
    epochs = [global_batches(sizes, 8, 1, (1, epoch)) for epoch in (0, 1)]
    padded = sum(-(-int(sizes[b].max()) // ALIGN) * ALIGN * len(b) for b in epochs[0])
    assert padded / sizes.sum() - 1 < most
    first, second = ({frozenset(each.tolist()) for each in epoch} for epoch in epochs)
    assert len(first & second) < 0.02 * len(first)


def test_neighbors_by_length_are_spread_over_batches() -> None:
    # Five samples of each length, as of the pairs of one passage.
    sizes = np.repeat(np.arange(20, 180), 5).astype(np.int32)
    for batch in global_batches(sizes, 8, 2, (1, 2), spread=8):
        found = sizes[batch]
        assert len({*found.tolist()}) == len(found)
        assert found.max() - found.min() < 30


def test_an_incomplete_batch_has_any_lengths() -> None:
    # The shortest samples alone may be pairs of one passage, from which a step learns nothing.
    sizes = np.arange(20, 120, dtype=np.int32)
    rests = [global_batches(sizes, 8, 2, (seed,)) for seed in range(20)]
    lengths = [sizes[batch].mean() for step in rests for batch in step if len(batch) == 4]
    assert len(lengths) == 20
    assert 60 < np.mean(lengths) < 80


@pytest.mark.parametrize(("count", "faster"), [(300, 0.3), (900, 0.4), (1500, 1.0)])
def test_few_samples_for_many_ranks_have_little_padding(count: int, faster: float) -> None:
    """64 samples for each of 16 ranks: one incomplete batch, or one of any lengths and a rest."""
    random = np.random.default_rng(4)
    sizes = np.clip(random.lognormal(4, 0.8, count), 8, 384).astype(np.int32)
    found = global_batches(sizes, 64, 16, (1,))
    dealt = [deal(batch, sizes, 16, 64) for batch in found]
    strided = [[batch[rank::16] for rank in range(16)] for batch in found]

    def padded(batch: Indices) -> int:
        return int(sizes[batch].max()) * len(batch)

    def share(steps: list[list[Indices]]) -> float:
        every = [batch for step in steps for batch in step]
        return 1 - sum(int(sizes[b].sum()) for b in every) / sum(map(padded, every))

    assert share(dealt) < 0.15
    assert share(strided) > 0.7, "what dealing in turn would have"
    for new, old in zip(dealt, strided, strict=True):
        assert max(map(padded, new)) <= faster * max(map(padded, old)), "the slowest rank's tokens"


def test_epochs_differ_and_repeat_with_their_seed() -> None:
    sizes = some_lengths(64)
    first, again, second = (epoch_batches(sizes, 8, 0, 1, (42, epoch)) for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_inputs_are_padded_to_the_longest_and_masked() -> None:
    features = [
        Feature(0, {"input_ids": np.full(size, 9, np.int32)}, 1, size - 1)
        for size in (1, ALIGN + 1)
    ]
    batch = pad_inputs(features, pad_token=7)
    assert batch["input_ids"].shape == (2, 2 * ALIGN)
    assert batch["input_ids"][0].tolist() == [9] + [7] * (2 * ALIGN - 1)
    assert batch["attention_mask"].sum(dim=1).tolist() == [1, ALIGN + 1]


def test_parts_are_as_narrow_as_their_longest_sample() -> None:
    mask = torch.zeros(4, 32, dtype=torch.long)
    for row, size in enumerate((30, 25, 9, 3)):
        mask[row, :size] = 1
    tensors = {"input_ids": mask, "attention_mask": mask, "start_positions": torch.arange(4)}
    chances = torch.zeros(4, 32)  # of 32 classes: not tokens
    batch = StepBatch({**tensors, "chances": chances}, [1, 2, 3, 4], 10, 67, 128)
    (first, one), (second, other) = batch.split(2)
    assert (first["input_ids"].shape, second["input_ids"].shape) == ((2, 30), (2, 10))
    assert second["start_positions"].tolist() == [2, 3]
    assert second["chances"].shape == (2, 32)
    assert (one, other) == (3, 7)
    assert len(batch.split(9)) == 4, "no part without samples"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [1 - n / 16 for n in range(16)]),
        ("constant", [1.0] * 16),
        ("cosine", [(1 + math.cos(math.pi * n / 16)) / 2 for n in range(16)]),
    ],
)
def test_the_rate_rises_and_then_has_its_shape_and_is_never_zero(
    shape: str, expected: list[float]
) -> None:
    options = replace(DEMO, epochs=2, batch_size=5, warmup_ratio=0.2, lr_schedule=shape)
    schedule = plan_schedule(options, 50, ranks=1)
    assert schedule == Schedule(per_epoch=10, total=20, warmup=4, shape=shape)
    assert [schedule.rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [schedule.rate(step) for step in range(4, 20)] == pytest.approx(expected)
    for ratio, steps in product((0.0, 0.1, 1.0), (1, 2, 7)):
        schedule = plan_schedule(replace(options, warmup_ratio=ratio, max_steps=steps), 108, 2)
        assert schedule.total == steps
        # One rate more than steps: torch's scheduler asks for it after the last step.
        assert all(0 < schedule.rate(step) <= 1 for step in range(steps + 1))
