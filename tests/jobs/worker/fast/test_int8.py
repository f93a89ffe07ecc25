"""Products in int8: what they compute, where they are used, and a model that they would harm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from jobs.worker.fast import int8
from jobs.worker.fast.compilation import find_layers, plain_layers
from jobs.worker.fast.first_batches import FastLayers
from jobs.worker.fast.int8 import Int8Linear, Int8Product, round_rows, use_int8
from jobs.worker.fast.parts import find_parts
from jobs.worker.runtime.precision import INT8_FLAGS, read_cpu_flags
from tests.jobs.worker.fast import test_first_batches as models

bert = partial(models.bert, initializer_range=0.2)
llama = partial(models.llama, initializer_range=0.1)
batch = partial(models.batch, 4, 12, padded=False)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace layers as for compilation, and run what was traced: the C++ compiler takes most of a minute."""
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: plain(self, backend="aot_eager"))
    monkeypatch.setattr(int8, "LEAST_SIZE", 32)
    if not read_cpu_flags() & {*INT8_FLAGS}:  # as it would be here
        monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_product_and_its_gradients_have_the_values_of_rounded_operands() -> None:
    values, weight = torch.randn(6, 40), torch.randn(8, 40)
    values[2], weight[3] = 0, 0
    values[4] *= 1e6  # a scale for each row: others keep their digits
    by_row = weight.abs().amax(1, keepdim=True)
    rounded = (weight / by_row.clamp(min=1e-30) * 127).round() * by_row / 127
    most = values.abs().amax(1, keepdim=True)
    expected = (values / most.clamp(min=1e-30) * 127).round() * most / 127 @ rounded.t()

    values.requires_grad_()
    trained = weight.clone().requires_grad_()
    apply: Any = Int8Product.apply
    found = apply(values, trained, None, *round_rows(weight))

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not found[2].any()
    assert not found[:, 3].any()
    plain = values @ weight.t()
    assert 0 < (found - plain)[0].norm() < 0.02 * plain[0].norm()

    gradient = torch.randn(6, 8)
    of_values, of_weight = torch.autograd.grad(found, (values, trained), gradient)
    torch.testing.assert_close(of_weight, gradient.t() @ values)
    assert 0 < (of_values - gradient @ weight).norm() < 0.02 * (gradient @ weight).norm()


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(bert, torch.bfloat16), (bert, torch.float32), (llama, torch.bfloat16)],
    ids=["bert bf16", "bert fp32", "llama"],
)
def test_compiled_layers_use_it_and_evaluation_does_not(make: Any, dtype: torch.dtype) -> None:
    results, said = [], list[str]()
    for has_int8 in (False, True):
        model = make().train()
        for each in model.modules():
            each.p = 0.0  # no dropout
        fast = FastLayers(model, said.append, shared=False, int8=True) if has_int8 else None
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model(**batch())
            output.loss.backward()
        assert fast is None or (fast.trouble, said, fast.count) == ("", [], 2)
        assert ("int8 products" in find_parts(model)) == has_int8
        gradients = torch.cat([each.grad.flatten() for each in find_layers(model)[0].parameters()])
        model.eval()
        torch.manual_seed(2)
        results.append((output.logits.float(), gradients.float(), model(**batch()).logits))
    (plain, of_plain, tested), (rounded, of_rounded, tested_too) = results

    assert 0 < (rounded - plain).norm() < 0.03 * plain.norm()
    assert 0 < (of_rounded - of_plain).norm() < 0.1 * of_plain.norm()
    assert torch.equal(tested, tested_too)


def test_only_large_linear_modules_of_layers_have_it_and_no_longer_than_compiled() -> None:
    model = bert()
    layer = find_layers(model)[0]
    layer.adapter = nn.Linear(32, 8)
    use_int8(find_layers(model))
    kinds = {
        name: type(each) for name, each in model.named_modules() if isinstance(each, nn.Linear)
    }

    assert {name for name, kind in kinds.items() if kind is nn.Linear} == {
        "bert.encoder.layer.0.adapter",
        "cls.predictions.transform.dense",
        "cls.predictions.decoder",
    }
    plain_layers(model)
    assert not any(isinstance(each, Int8Linear) for each in model.modules())


@pytest.mark.parametrize("frozen", [True, False])
def test_inputs_are_kept_only_for_weights_that_are_trained(frozen: bool) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(not frozen)
    use_int8([layer])
    kept: list[Any] = []

    def keep(values: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(values.shape))
        return values

    layer.compile()
    values = torch.randn(40, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        layer(values).square().sum().backward()

    assert values.grad is not None
    assert (layer[0].weight.grad is None) == frozen
    # For the square, and each weight's gradient.
    assert kept.count((40, 64)) == (1 if frozen else 3)


def test_a_model_that_it_would_change_too_much_is_trained_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8, "LARGEST", 1)
    model, said = bert().train(), list[str]()
    fast = FastLayers(model, said.append, shared=False, int8=True)
    model(**batch()).loss.backward()

    assert "outputs would differ from those of plain layers by" in fast.trouble
    assert said == [f"layers are no longer compiled: rank 0: {fast.trouble}"]
    assert not any(isinstance(each, Int8Linear) for each in model.modules())
