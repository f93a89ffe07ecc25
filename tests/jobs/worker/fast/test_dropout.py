"""Dropout by a hash: how much it drops, that it is random, and that seeds follow torch's generator."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForQuestionAnswering

from jobs.worker.fast.dropout import HashDropout, draw_seeds, replace_dropouts, restore_dropouts

ONES = torch.ones(64, 48, 96)


def dropped(layer: HashDropout, seed: int) -> torch.Tensor:
    layer.seed.fill_(seed)
    result: torch.Tensor = layer(ONES)
    return result


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_it_drops_its_share_and_scales_the_rest(p: float) -> None:
    layer = HashDropout(0.25)
    layer.p = p  # as a script may
    found = dropped(layer, 77)
    assert sorted(set(found.flatten().tolist())) == [0.0, pytest.approx(1 / (1 - p))]
    # Five standard deviations of the mean of as many independent numbers.
    tolerance = 5 * (p * (1 - p) / ONES.numel()) ** 0.5
    assert float((found == 0).float().mean()) == pytest.approx(p, abs=tolerance)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31 - 1, -ONES.numel() // 2])
def test_rows_columns_and_seeds_are_independent(seed: int) -> None:
    layer = HashDropout(0.5)
    here = (dropped(layer, seed) > 0).float().view(-1, 96)
    there = (dropped(layer, (seed + 1) % 2**31) > 0).float().view(-1, 96)
    count = here.numel()
    # With the last seed, reversed: the hashes of x and ~x, which an arithmetic shift would make the same.
    reverse = here.flatten().flip(0).view(here.shape)
    pairs = ((here, there), (here[1:], here[:-1]), (here[:, 1:], here[:, :-1]), (here, reverse))
    for one, other in pairs:
        agreement = float((one == other).float().mean())
        assert agreement == pytest.approx(0.5, abs=5 * 0.5 / count**0.5)
    # Sums of rows and columns vary as those of independent numbers do.
    assert float(here.mean(0).var()) == pytest.approx(0.25 / len(here), rel=0.6)
    assert float(here.mean(1).var()) == pytest.approx(0.25 / 96, rel=0.15)


def test_gradients_pass_where_values_do() -> None:
    layer, values = HashDropout(0.25), ONES.clone().requires_grad_()
    layer.seed.fill_(5)
    found = layer(values)
    found.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, found)


def test_each_layer_that_shares_a_dropout_drops_other_elements() -> None:
    config = AlbertConfig(
        vocab_size=99,
        embedding_size=8,
        hidden_size=8,
        num_attention_heads=1,
        intermediate_size=8,
        hidden_dropout_prob=0.1,
    )
    model = AlbertForQuestionAnswering(config).train()
    masks: list[torch.Tensor] = []
    for each in replace_dropouts(model):
        each.register_forward_hook(lambda _, given, found: masks.append(found == 0))

    def take() -> list[torch.Tensor]:
        masks.clear()
        torch.manual_seed(1)
        draw_seeds(model)
        model(input_ids=torch.arange(2, 66).view(2, 32))
        return list(masks)

    first = take()
    assert len(first) > config.num_hidden_layers
    assert len({bytes(each.numpy()) for each in first}) == len(first)
    assert all(map(torch.equal, first, take())), "the seed decides"


def test_dropouts_begin_with_different_seeds_of_torchs_generator() -> None:
    seeds = [int(HashDropout(0.5).seed) for _ in range(3) if torch.manual_seed(_ % 2)]
    assert seeds[0] == seeds[2] != seeds[1]


def test_evaluation_and_dropout_of_0_drop_nothing_and_of_1_all() -> None:
    assert HashDropout(0.5).eval()(ONES) is HashDropout(0.0)(ONES) is ONES
    assert not HashDropout(1)(ONES).any()


def test_a_models_dropouts_are_replaced_and_restored() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(0.25), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0))
    )
    assert [each.p for each in replace_dropouts(model)] == [0.25, 0.5]
    assert not model.state_dict().keys() - {"0.weight", "0.bias"}

    def draw() -> list[int]:
        draw_seeds(model)
        return [int(each.seed) for each in model.modules() if isinstance(each, HashDropout)]

    first, state, second = draw(), torch.get_rng_state(), draw()
    torch.set_rng_state(state)
    assert draw() == second
    assert len({*first, *second}) == 4
    model.eval()
    restore_dropouts(model)
    kinds = [each for each in model.modules() if isinstance(each, nn.Dropout)]
    assert [(each.p, each.training) for each in kinds] == [(0.25, False), (0.5, False), (0, False)]
