"""AdamW with masters: the steps of torch's AdamW, and the state of fp32 training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from jobs.worker.fast.compilation import why_no_compiler
from jobs.worker.fast.optimizer import (
    CHUNK,
    MasterAdamW,
    group_parameters,
    halve_weights,
    restore_weights,
)

RATE, MOST = 1e-2, 1.0
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def compiler(compiled: None) -> None:
    if why := why_no_compiler():
        pytest.skip(why)


def new_model() -> nn.Module:
    """A model with a table, two layers, one tensor of several chunks, and a frozen one."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(160, 160), nn.LayerNorm(160)) for _ in range(2)]
    model = nn.ModuleDict({"words": nn.Embedding(50, 160), "layers": nn.ModuleList(layers)})
    assert layers[0][0].weight.numel() > CHUNK  # type: ignore[operator]
    layers[1][0].bias.requires_grad_(False)
    return model


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    torch.manual_seed(seed)
    for each in model.parameters():
        if each.requires_grad:
            # Of both models, the numbers of bf16.
            each.grad = (scale * torch.randn(each.shape)).bfloat16().to(each.dtype)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torch(decay: float) -> None:
    model, plain = new_model(), new_model()
    masters = halve_weights(model)
    assert [each.dtype for each in masters] == [torch.bfloat16] * 2
    optimizer = MasterAdamW(model, masters, RATE, MOST, decay)
    decays = [name for name, _ in plain.named_parameters() if name.endswith("0.weight")]
    groups = [
        {"params": [each], "weight_decay": decay if name in ["words.weight", *decays] else 0.0}
        for name, each in plain.named_parameters()
    ]
    torchs = torch.optim.AdamW(groups, RATE)
    for number, scale in enumerate((1e-3, 1.0, 1e-5)):
        for group in (*optimizer.param_groups, *torchs.param_groups):
            group["lr"] = RATE / (number + 1)
        set_gradients(model, number, scale)
        set_gradients(plain, number, scale)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), MOST)
        assert optimizer.step() == pytest.approx(float(norm), rel=1e-5)
        torchs.step()
    saved = model.state_dict()
    for name, each in plain.state_dict().items():
        assert saved[name].dtype == torch.float32
        assert torch.allclose(saved[name], each, rtol=1e-4, atol=1e-6), name
    for weight, master in masters.items():
        assert torch.equal(weight.data, master.data.bfloat16())
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())


def test_state_goes_to_fp32_training_and_back() -> None:
    model = new_model()
    optimizer = MasterAdamW(model, halve_weights(model), RATE, MOST)
    set_gradients(model, 1)
    optimizer.step()
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    plain = new_model()
    torchs = torch.optim.AdamW(group_parameters(plain, 0.0), RATE, weight_decay=0.0, fused=True)
    plain.load_state_dict(saved)
    torchs.load_state_dict(state)

    again = new_model()
    masters = halve_weights(again)
    resumed = MasterAdamW(again, masters, RATE, MOST)
    again.load_state_dict(plain.state_dict())
    resumed.load_state_dict(torchs.state_dict())
    for each in (model, again):
        set_gradients(each, 2)
    optimizer.step()
    resumed.step()
    expected = model.state_dict()
    restore_weights(again)
    for name, each in again.state_dict().items():
        assert each.dtype == torch.float32
        assert torch.equal(each, expected[name]), name
    again.load_state_dict(saved)  # without the hooks


def test_gradients_that_are_not_finite_change_nothing() -> None:
    model = new_model()
    optimizer = MasterAdamW(model, halve_weights(model), RATE, MOST)
    before = copy.deepcopy(model.state_dict())
    set_gradients(model, 1, math.inf)
    assert not math.isfinite(optimizer.step())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize(("threads", "transposed"), [(3, False), (1, True)])
def test_results_depend_on_neither_the_threads_nor_the_gradients_layout(
    threads: int, transposed: bool
) -> None:
    found = []
    before = torch.get_num_threads()
    for other in (False, True):
        torch.set_num_threads(threads if other else 1)
        model = new_model()
        masters = halve_weights(model)
        optimizer = MasterAdamW(model, masters, RATE, MOST)
        set_gradients(model, 1)
        for weight in masters if other and transposed else ():
            assert weight.grad is not None
            weight.grad = weight.grad.t().contiguous().t()
        found.append((optimizer.step(), model.state_dict()))
    torch.set_num_threads(before)
    (norm, one), (other_norm, changed) = found
    assert norm == other_norm
    assert all(torch.equal(each, changed[name]) for name, each in one.items())


def test_a_trained_parameter_of_another_type_is_refused() -> None:
    model = new_model().bfloat16()
    with pytest.raises(ValueError, match="bfloat16"):
        MasterAdamW(model, halve_weights(model), RATE, MOST)
