"""What compiled layers do with the first batch of each kind: it is computed with plain ones as well."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jobs.worker.fast import attention, first_batches
from jobs.worker.fast.compilation import find_layers, is_compiled
from jobs.worker.fast.dropout import draw_seeds
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


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**shape, vocab_size=64, intermediate_size=64, **options))


def batch(rows: int, width: int, *, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (rows, width))
    mask = torch.ones_like(ids)
    mask[-1, width // 2 :] = not padded
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture(autouse=True)
def _limits_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths where attention changes are the same on every machine."""
    for module in (attention, first_batches):
        monkeypatch.setattr(module, "LONGEST", 384)
        monkeypatch.setattr(module, "LONGEST_CAUSAL", 128)


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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "own"])
def test_gradients_are_right_with_gradient_checkpointing(when: str, reentrant: bool) -> None:
    options: Any = {"use_reentrant": reentrant}
    model = bert().train()
    if when == "before":
        model.activation_checkpointing_enable(options)
    said: Said = []
    FastLayers(model, said.append, shared=False)
    inputs = batch(3, 24)
    if when == "after":
        model(**inputs)
        model.activation_checkpointing_enable(options)
    elif when == "own":
        layer = find_layers(model)[0]
        forward = layer.forward
        layer.forward = lambda *given, **named: checkpoint(forward, *given, **options, **named)
        if reentrant:  # it takes no named arguments
            layer.forward = lambda *given, **named: checkpoint(
                lambda *given: forward(*given, **named), *given, **options
            )
    torch.manual_seed(5)
    model(**inputs).loss.backward()
    reason = "gradient checkpointing computes them twice, with other dropout"
    if (when, reentrant) == ("own", True):
        reason = "reentrant checkpointing hides gradients"
    assert said == [f"layers are no longer compiled: rank 0: {reason}"]
    weight = model.get_parameter("bert.encoder.layer.0.intermediate.dense.weight")
    direction = torch.randn_like(weight)
    expected = float((weight.grad * direction).sum())
    losses = []
    for step in (1e-2, -2e-2):
        weight.data += step * direction
        torch.manual_seed(5)
        losses.append(model(**inputs).loss.item())
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


def grown(model: Any) -> Any:
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2)
    return model


def saved(model: Any, folder: Path) -> Any:
    torch.save(model, folder / "model.pt")
    content = (folder / "model.pt").read_bytes()
    assert not [name for name in (b"jobs.worker", b"products") if name in content]
    return torch.load(folder / "model.pt", weights_only=False)


@pytest.mark.parametrize("part", ["", "bert"])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("take", [saved, lambda model, _: copy.deepcopy(model)])
def test_a_copy_is_plain_and_independent(take: Any, part: str, ended: bool, tmp_path: Path) -> None:
    model, inputs = bert().train(), batch(2, 16)
    fast = FastLayers(model, lambda _: None, shared=False)
    model(**inputs)
    if ended:
        fast.end([])
    other = grown(take(model.get_submodule(part), tmp_path))
    assert find_parts(other) == []
    assert not is_compiled(other)
    assert {type(each) for each in other.modules() if isinstance(each, nn.Dropout)} == {nn.Dropout}
    inputs = inputs if not part else {"input_ids": inputs["input_ids"]}
    other(**inputs)[0].sum().backward()
    assert all(each.grad is None for each in model.parameters())
    wanted = grown(bert()).get_submodule(part).eval()(**inputs)[0]
    torch.testing.assert_close(other.eval()(**inputs)[0], wanted)
    model(**batch(2, 16))
    assert is_compiled(model) is not ended
    assert not is_compiled(other)


@pytest.mark.parametrize("part", ["bert", "bert.encoder", "forward"])
def test_a_part_with_the_layers_may_be_called_as_well(part: str) -> None:
    model, inputs = bert().train(), {"input_ids": batch(2, 16)["input_ids"]}
    said: Said = []
    FastLayers(model, said.append, shared=False)
    call = model.forward if part == "forward" else model.get_submodule(part)
    if part == "bert.encoder":
        inputs = {"hidden_states": torch.randn(2, 16, 32)}

    def compute(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        result: torch.Tensor = call(**inputs)[0]
        return result

    model.eval()
    expected = compute(1)
    assert not is_compiled(model)
    model.train()
    first, other, again = (compute(seed) for seed in (1, 2, 1))
    assert is_compiled(model)
    assert said == []
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    model.eval()
    torch.testing.assert_close(compute(1), expected)


class Towers(nn.Module):
    """A model that calls its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert().bert

    def forward(self, one: Any, two: Any) -> torch.Tensor:
        vectors = [self.bert(**each)[0][:, 0] for each in (one, two)]
        product: torch.Tensor = vectors[0] * vectors[1]
        return product.sum()


def test_a_model_that_calls_its_layers_twice_is_entered_once() -> None:
    model = Towers().train()
    said: Said = []
    fast = FastLayers(model, said.append, shared=False)
    both = [{n: b[n] for n in ("input_ids", "attention_mask")} for b in (batch(2, 16), batch(2, 9))]
    both[1] = {"input_ids": both[1]["input_ids"]}
    with patch.object(first_batches, "draw_seeds", wraps=draw_seeds) as draw:
        model(*both).backward()
        assert draw.call_count == 3, "two of them compare"
    assert said == []
    with pytest.raises(ValueError, match="exactly one"):
        model(both[0], {})
    model.eval()
    model.bert(**both[0])
    assert not is_compiled(model), "an error inside left it entered"
    assert fast.count


class Counting(nn.Module):
    """Layers, and a buffer that a forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.layers[1](self.layers[0](values)).pow(2).sum()  # type: ignore[no-any-return]


def test_a_buffer_that_is_replaced_counts_once() -> None:
    model = Counting().train()
    FastLayers(model, print, shared=False)
    model(torch.ones(3, 4)).backward()
    assert int(model.count) == 1


@pytest.mark.parametrize(
    ("autocast", "stays"), [("none", False), ("inside", True), ("outside", True)]
)
def test_autocast_decides_how_much_results_may_differ(
    autocast: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate's is part of the model's forward pass."""
    monkeypatch.setattr(first_batches, "_difference", lambda *_: 0.04)
    model = Counting().train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast == "outside"):
        if autocast == "inside":
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # type: ignore[method-assign]
        FastLayers(model, lambda _: None, shared=False)
        model(torch.ones(3, 4))
    assert is_compiled(model) is stays
