"""Attention as products: the same outputs, gradients, and answers as torch's and the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AlbertConfig,
    AlbertForQuestionAnswering,
    BertConfig,
    BertForQuestionAnswering,
    DistilBertConfig,
    DistilBertForQuestionAnswering,
    LlamaConfig,
    LlamaForCausalLM,
)

from jobs.worker.fast import attention
from jobs.worker.fast.attention import (
    attend,
    find_dropout,
    stop_using_products,
    use_products,
)
from jobs.worker.fast.compilation import compile_layers
from jobs.worker.fast.dropout import HashDropout, keep_mask, replace_dropouts


def make_inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    tensors = [torch.randn(2, 3, 20, 8).to(dtype).requires_grad_() for _ in range(3)]
    mask = torch.zeros(2, 1, 1, 20)
    mask[1, ..., 13:] = torch.finfo(torch.float32).min
    return tensors, mask


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_outputs_and_gradients_are_torchs_own(dtype: torch.dtype, exact: float, p: float) -> None:
    tensors, mask = make_inputs(dtype)
    module = nn.Module()
    module.dropout = HashDropout(p)
    query, key, value = tensors
    keep = keep_mask((2, 3, 20, 20), module.dropout.seed, p)
    found, _ = attend(module, query, key, value, mask, 0.3, p)
    found = found.transpose(1, 2)
    gradient = torch.randn_like(found)
    gradients = torch.autograd.grad(found, tensors, gradient)
    precise = [each.detach().double().requires_grad_() for each in tensors]
    query, key, value = precise
    weights = torch.softmax(query @ key.mT * 0.3 + mask.double(), -1)
    expected = (weights * keep / (1 - p)) @ value
    for one, other in zip(
        (found, *gradients),
        (expected, *torch.autograd.grad(expected, precise, gradient.double())),
        strict=True,
    ):
        assert torch.allclose(one.double(), other, rtol=exact, atol=exact)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """The masks that attention gets."""
    masks: list[torch.Tensor | None] = []

    def record(*arguments: Any, **options: Any) -> Any:
        masks.append(arguments[4])
        return attend(*arguments, **options)

    monkeypatch.setattr(attention, "attend", record)
    return masks


def test_long_batches_of_language_models_have_no_mask(
    masks: list[torch.Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, **SIZES, num_key_value_heads=1))
    expected = model(torch.arange(12).view(1, 12)).logits
    assert len(use_products(model)) == 2
    masks.clear()
    assert torch.allclose(model(torch.arange(12).view(1, 12)).logits, expected, atol=1e-5)
    monkeypatch.setattr(attention, "LONGEST_CAUSAL", 8)
    assert torch.allclose(model(torch.arange(12).view(1, 12)).logits, expected, atol=1e-5)
    assert [mask is None for mask in masks] == [False, False, True, True]
    stop_using_products(model)
    assert model.config._attn_implementation == "sdpa"


def test_each_call_drops_other_weights() -> None:
    (query, key, value), mask = make_inputs(torch.float32)
    module = nn.Module()
    module.dropout = HashDropout(0.5)
    (first, _), (second, _) = (
        attend(module, query, key, value, mask, dropout=0.5) for _ in range(2)
    )
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("more", [0, 1])
def test_products_are_for_short_texts(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONGEST", 20 - more)
    (query, key, value), mask = make_inputs(torch.float32)
    found, _ = attend(None, query, key, value, mask)
    assert ("ProductAttention" in str(found.grad_fn.next_functions)) is not bool(more)  # type: ignore[union-attr]


@pytest.mark.parametrize(("masked", "p"), [(False, 0.0), (True, 0.5)])
def test_without_a_mask_or_a_known_dropout_it_is_torchs_own(masked: bool, p: float) -> None:
    (query, key, value), mask = make_inputs(torch.float32)
    given = mask if masked else None
    torch.manual_seed(1)
    found, weights = attend(None, query, key, value, given, dropout=p)
    torch.manual_seed(1)
    expected = scaled_dot_product_attention(query, key, value, given, p)
    assert weights is None
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)


SMALL = {"vocab_size": 99, "max_position_embeddings": 64}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.mark.parametrize(
    "kind", [(BertConfig, BertForQuestionAnswering), (AlbertConfig, AlbertForQuestionAnswering)]
)
def test_dropout_of_weights_is_found_in_a_model(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, family = kind
    own = {"embedding_size": 16, "attention_probs_dropout_prob": 0.1}
    model = family(config(**SMALL, **SIZES, **own)).train()
    replace_dropouts(model)
    assert use_products(model)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", None)
    given: list[float] = []

    def record(shape: Any, seed: torch.Tensor, p: float) -> torch.Tensor:
        given.append(p)
        return keep_mask(shape, seed, p)

    monkeypatch.setattr(attention, "keep_mask", record)
    model(input_ids=torch.arange(16).view(2, 8)).start_logits.sum().backward()
    assert given == [0.1, 0.1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_compiled_layers_keep_the_dropout_of_their_attention(p: float) -> None:
    config = BertConfig(**SMALL, **SIZES, attention_probs_dropout_prob=p)
    model = BertForQuestionAnswering(config).train()
    compile_layers(model)
    for layer in model.bert.encoder.layer:
        found = find_dropout(layer.attention.self)
        assert (found.p if found else 0.0) == p
        assert layer.attention.output.dropout.p == 0.1


def test_a_batch_without_padding_has_a_mask_too(masks: list[torch.Tensor | None]) -> None:
    config = DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=32, **SMALL)
    model = DistilBertForQuestionAnswering(config)
    assert use_products(model)
    masks.clear()
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    (mask,) = masks
    assert mask is not None
    assert mask.count_nonzero() == 0


def test_attention_that_ignores_padding_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # With weights of the usual size, the answers hardly depend on the mask.
    large = {**SMALL, "initializer_range": 0.5}
    config = DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=32, **large)
    model = DistilBertForQuestionAnswering(config)
    monkeypatch.setattr(
        attention,
        "attend",
        lambda module, query, key, value, mask, *_, **__: attend(module, query, key, value, None),
    )
    assert not use_products(model)
    assert model.config._attn_implementation == "sdpa"
