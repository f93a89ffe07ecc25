"""What compiled layers do with the first batch of each kind: it is computed with plain ones as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jobs.worker.fast import attention, first_batches
from jobs.worker.fast.compilation import find_layers
from jobs.worker.fast.first_batches import FastLayers
from jobs.worker.fast.parts import find_parts

Said = list[str]


@pytest.fixture(autouse=True)
def eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark modules as compiled, but run them as they are: compilation takes most of a minute."""

    def compile_eagerly(module: Any, **_: Any) -> None:
        module._compiled_call_impl = lambda *inputs, **named: module._call_impl(*inputs, **named)

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, intermediate_size=64, **options))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**shape, vocab_size=64, intermediate_size=64))


def batch(rows: int, width: int, *, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (rows, width))
    mask = torch.ones_like(ids)
    mask[-1, width // 2 :] = not padded
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def is_compiled(model: Any) -> bool:
    return any(each._compiled_call_impl is not None for each in model.modules())


@pytest.mark.parametrize("make", [llama, bert])
def test_each_kind_of_batch_is_compared_once_and_nothing_remains_of_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    plain = first_batches._differentiate

    def count(model: Any, inputs: Any, named: Any) -> Any:
        compared.append(named["input_ids"].shape[1])
        return plain(model, inputs, named)

    monkeypatch.setattr(first_batches, "_differentiate", count)
    said: Said = []
    model = make().train()
    FastLayers(model, said.append, shared=False)
    given = [batch(2, width) for width in (40, 48, 200, 208, 400, 40)]

    def gradients(inputs: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model.zero_grad()
        model(**inputs).loss.backward()
        return [each.grad.clone() for each in model.parameters()]

    first = [gradients(each) for each in given]
    assert compared == [40, 40, 200, 200, 400, 400]
    assert said == []
    assert is_compiled(model)
    for one, again in zip(first, [gradients(each) for each in given], strict=True):
        assert all(map(torch.equal, one, again))


@pytest.mark.parametrize("width", [40, 200, 400])
def test_a_wrong_mask_ends_compilation_with_a_line(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `attend` once: a Boolean mask was added to the scores."""
    model = llama().train()
    inputs = batch(3, width)
    wanted = model(**inputs).loss
    said: Said = []
    fast = FastLayers(model, said.append, shared=False)
    assert model.config._attn_implementation == attention.NAME
    attend = attention.attend

    def attend_wrongly(module: Any, *inputs: Any, **named: Any) -> Any:
        query, key, value, mask = inputs
        return attend(module, query, key, value, None if mask is None else mask * 0, **named)

    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attend_wrongly)
    found = model(**inputs).loss
    assert fast.trouble in said[0]
    assert len(said) == 1
    assert "outputs would differ" in said[0]
    assert not is_compiled(model)
    torch.testing.assert_close(found, wanted)
    AttentionInterface.register(attention.NAME, attend)


@pytest.mark.parametrize("backward", [False, True])
def test_layers_that_cannot_be_compiled_stay_plain(backward: bool) -> None:
    model = bert().train()
    said: Said = []
    fast = FastLayers(model, said.append, shared=False)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
            return values + 0

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> Any:
            raise RuntimeError("no lowering for it")

    def fail(*inputs: Any, **named: Any) -> Any:
        if not backward:
            raise RuntimeError("no lowering for it")
        layer = find_layers(model)[0]
        return Fails.apply(layer._call_impl(*inputs, **named))  # type: ignore[no-untyped-call]

    layer = find_layers(model)[0]
    assert find_parts(model)[0] == f"{fast.count} compiled layers"
    assert "dropout by a hash" in find_parts(model)
    fast._calls = [(each, fail if each is layer else call) for each, call in fast._calls]
    model(**batch(2, 16)).loss.backward()
    assert said == ["layers are no longer compiled: rank 0: no lowering for it"]
    assert not is_compiled(model)
    assert find_parts(model) == []


def test_a_single_row_is_not_compiled_unless_all_are() -> None:
    for first, fast in ((2, False), (1, True)):
        model = bert().train()
        FastLayers(model, print, shared=False)
        model(**batch(first, 16))
        assert is_compiled(model)
        model(**batch(1, 16, padded=False))
        assert is_compiled(model) is fast
        model(**batch(2, 16))
        assert is_compiled(model)


@pytest.mark.parametrize("when", ["before", "after", "own"])
def test_gradients_are_right_with_gradient_checkpointing(when: str) -> None:
    model = bert().train()
    if when == "before":
        model.activation_checkpointing_enable()
    said: Said = []
    FastLayers(model, said.append, shared=False)
    inputs = batch(3, 24)
    if when == "after":
        model(**inputs)
        model.activation_checkpointing_enable()
    elif when == "own":
        layer = find_layers(model)[0]
        forward = layer.forward
        layer.forward = lambda *given, **named: checkpoint(
            forward, *given, use_reentrant=False, **named
        )
    torch.manual_seed(5)
    model(**inputs).loss.backward()
    assert said == [
        "layers are no longer compiled: rank 0: gradient checkpointing computes them twice, "
        "with other dropout"
    ]
    weight = model.get_parameter("bert.encoder.layer.0.intermediate.dense.weight")
    direction = torch.randn_like(weight)
    expected = float((weight.grad * direction).sum())
    losses = []
    with torch.no_grad():
        for step in (1e-2, -2e-2):
            weight += step * direction
            torch.manual_seed(5)
            losses.append(float(model(**inputs).loss))
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(expected, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("width", [40, 200, 400])
def test_a_decoder_cannot_read_the_answers_from_its_inputs(width: int) -> None:
    """What it says of a token is the same, to the bit, regardless of what follows."""
    model, begin = llama(pad_token_id=0).train(), width // 3
    FastLayers(model, lambda _: None, shared=False)
    inputs = batch(3, width)
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, begin:] = batch(3, width)["input_ids"][:, begin:]
    with torch.autocast("cpu", torch.bfloat16):
        one, same, changed = (model(**each).logits for each in (inputs, inputs, other))
    assert is_compiled(model)
    assert torch.equal(one, same)
    assert torch.equal(one[:, :begin], changed[:, :begin])
    assert not torch.allclose(one[:, begin:], changed[:, begin:], atol=0.1)
