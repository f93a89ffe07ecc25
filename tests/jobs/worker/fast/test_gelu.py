"""GELU by polynomials: as near to the exact one as rounding to bf16 allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers.activations import GELUActivation

from jobs.worker.fast.gelu import FastGelu, replace_gelus, restore_gelus


def results(function: nn.Module, values: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    values = values.clone().requires_grad_()
    result = function(values)
    result.backward(gradient.to(result.dtype))
    assert values.grad is not None
    return result.detach().double(), values.grad.double()


def test_values_and_gradients_differ_by_less_than_rounding() -> None:
    torch.manual_seed(1)
    values, gradient = (1.5 * torch.randn(100_000)).bfloat16(), torch.randn(100_000).bfloat16()
    exact = results(nn.GELU(), values.double(), gradient)
    rounded = results(nn.GELU(), values, gradient)
    found = results(FastGelu(nn.GELU()), values, gradient)
    for own, torchs, true in zip(found, rounded, exact, strict=True):
        assert (own - true).norm() < 1.01 * (torchs - true).norm()


def test_large_values_are_kept_or_become_zero() -> None:
    values = torch.tensor([-300.0, -20.0, -5.0, 0.0, 5.0, 300.0], dtype=torch.bfloat16)
    found, slopes = results(FastGelu(nn.GELU()), values, torch.ones(6))
    assert torch.allclose(found, values.double().clamp(min=0), rtol=1e-3, atol=1e-4)
    assert slopes.tolist() == pytest.approx([0, 0, 0, 0.5, 1, 1], abs=1e-6)


def test_other_types_and_activations_and_evaluation_stay() -> None:
    values = torch.randn(8)
    assert torch.equal(FastGelu(nn.GELU())(values), gelu(values))
    halves = torch.randn(10_000).bfloat16()
    assert torch.equal(FastGelu(nn.GELU()).eval()(halves), gelu(halves))
    assert not torch.equal(FastGelu(nn.GELU())(halves), gelu(halves))
    own = GELUActivation(use_gelu_python=True)
    model = nn.Sequential(nn.GELU(), nn.GELU("tanh"), GELUActivation(), own, nn.ReLU())
    before = list(model)
    replace_gelus(model)
    assert [type(each) is FastGelu for each in model] == [True, False, True, False, False]
    restore_gelus(model)
    assert list(model) == before
