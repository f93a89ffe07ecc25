from __future__ import annotations

import numpy as np
import pytest
import torch

from jobs.worker.data.tokens import Ints
from jobs.worker.tasks.squad.features import Feature
from jobs.worker.training.batches import (
    ALIGN,
    Indices,
    StepBatch,
    global_batches,
    pad_inputs,
    steps_per_epoch,
)


def some_lengths(count: int) -> Ints:
    return np.random.default_rng(1).integers(20, 384, count).astype(np.int32)


def epoch_batches(
    lengths: Ints, batch_size: int, rank: int, ranks: int, seed: tuple[int, ...], spread: int = 1
) -> list[Indices]:
    """Return one rank's batches of one epoch."""
    return [
        batch[rank::ranks] for batch in global_batches(lengths, batch_size, ranks, seed, spread)
    ]


@pytest.mark.parametrize("count", [1, 2, 7, 16, 97, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("spread", [1, 8])
def test_all_ranks_take_equal_steps_and_cover_all_features(
    count: int, ranks: int, batch_size: int, spread: int
) -> None:
    sizes = some_lengths(count)
    shares = [
        epoch_batches(sizes, batch_size, rank, ranks, (42, 0), spread) for rank in range(ranks)
    ]
    assert {len(share) for share in shares} == {steps_per_epoch(count, batch_size, ranks)}
    for step in zip(*shares, strict=True):
        assert len({len(batch) for batch in step}) == 1
        assert 1 <= len(step[0]) <= batch_size
    seen = np.concatenate([batch for share in shares for batch in share])
    assert set(seen) == set(range(count))
    assert len(seen) - count < ranks, "only what can't be divided comes twice"


def test_batches_of_all_ranks_have_similar_lengths() -> None:
    sizes = some_lengths(1008)  # whole batches
    for step in zip(*(epoch_batches(sizes, 8, rank, 2, (1, 2)) for rank in (0, 1)), strict=True):
        together = sizes[np.concatenate(step)]
        assert together.max() - together.min() < 60


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


def test_an_incomplete_batch_gives_each_rank_similar_lengths() -> None:
    sizes, ranks = some_lengths(60 * 16), 16
    (batch,) = global_batches(sizes, 64, ranks, (1,))
    assert sorted(batch) == [*range(len(sizes))]
    shares = [sizes[batch[rank::ranks]] for rank in range(ranks)]
    padded = sum(share.max() * len(share) for share in shares)
    assert padded < 1.1 * sizes.sum()  # in random order, 1.85


def test_epochs_differ_and_repeat_with_their_seed() -> None:
    sizes = some_lengths(64)
    first, again, second = (epoch_batches(sizes, 8, 0, 1, (42, epoch)) for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_inputs_are_padded_to_the_longest_and_masked() -> None:
    features = [
        Feature(
            0, {"input_ids": np.full(size, 9, np.int32)}, np.zeros((size, 2), np.int32), 1, size - 1
        )
        for size in (3, ALIGN + 1)
    ]
    batch = pad_inputs(features, pad_token=7)
    assert batch["input_ids"].shape == (2, 2 * ALIGN)
    assert batch["input_ids"][0].tolist() == [9] * 3 + [7] * (2 * ALIGN - 3)
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, ALIGN + 1]


def test_parts_are_as_narrow_as_their_longest_sample() -> None:
    mask = torch.zeros(4, 32, dtype=torch.long)
    for row, size in enumerate((30, 25, 9, 3)):
        mask[row, :size] = 1
    tensors = {"input_ids": mask, "attention_mask": mask, "start_positions": torch.arange(4)}
    chances = torch.zeros(4, 32)  # of 32 classes: not tokens
    batch = StepBatch({**tensors, "chances": chances}, [1, 2, 3, 4], 10, 67, 128)
    (first, one), (second, other) = batch.split(2)
    assert (first["input_ids"].shape, second["input_ids"].shape) == ((2, 32), (2, 16))
    assert second["start_positions"].tolist() == [2, 3]
    assert second["chances"].shape == (2, 32)
    assert (one, other) == (3, 7)
    assert len(batch.split(9)) == 4, "no part without samples"
