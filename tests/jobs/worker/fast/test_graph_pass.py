"""Rewritten products: equal to the plain ones, and used where they pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from jobs.worker.fast import graph_pass
from jobs.worker.fast.compilation import why_no_compiler
from jobs.worker.fast.graph_pass import GraphPass, compiler_options
from jobs.worker.runtime.precision import AMX_FLAGS


class Layer(nn.Module):
    """Three products with the same input, one that widens, and one that narrows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList([nn.Linear(size, size) for _ in range(3)])
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = (each(values) for each in self.inputs)
        result: Tensor = self.narrow(torch.relu(self.wide(query * key.tanh() + value)))
        return result


def gradients(layer: nn.Module, values: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        layer(values).float().square().mean().backward()
    return {name: each.grad.clone() for name, each in layer.named_parameters()}  # type: ignore[union-attr]


@pytest.fixture
def copies(compiled: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Use the pass in the test; return the shapes of the copies that it leads to."""
    if why := why_no_compiler():
        pytest.skip(why)
    made: list[tuple[int, ...]] = []
    transpose_compiled = graph_pass._compile_transpose()

    def transpose(values: Tensor) -> Tensor:
        made.append(tuple(values.shape))
        return transpose_compiled(values)

    monkeypatch.setattr(graph_pass, "_compile_transpose", lambda: transpose)
    monkeypatch.setattr(graph_pass, "read_cpu_flags", lambda: AMX_FLAGS)
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_gradients_are_the_plain_ones(copies: list[tuple[int, ...]]) -> None:
    torch.manual_seed(1)
    layer, values = Layer(512), torch.randn(3, 10, 512)
    plain = gradients(layer, values)
    layer.compile(dynamic=True, options=compiler_options())
    for _ in range(2):
        copies.clear()
        found = gradients(layer, values)
        assert copies == [(30, 512)] * 2
    for name, each in plain.items():
        assert torch.linalg.norm(found[name] - each) < 0.05 * torch.linalg.norm(each), name


def plain(one: Tensor, other: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return one.permute(1, 0) @ values, other.permute(1, 0) @ values


def dependent(one: Tensor, other: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    first = one.permute(1, 0) @ values
    return first, (other * first.sum()).permute(1, 0) @ values


@pytest.mark.parametrize(
    ("products", "sizes", "joins"),
    [(plain, (1024, 512), True), (plain, (512, 512), False), (dependent, (1024, 512), False)],
    ids=["large", "small", "dependent"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_large_products_with_the_same_input_become_one(
    products: Any, sizes: tuple[int, int], joins: bool
) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(6, size).bfloat16() for size in (*sizes, 8)]
    module = make_fx(products, tracing_mode="fake")(*inputs)
    GraphPass()(module.graph)
    module.graph.lint()
    module.recompile()
    found = [node.target for node in module.graph.nodes].count(torch.ops.aten.mm.default)
    assert found == (1 if joins else 2)
    for one, other in zip(module(*inputs), products(*inputs), strict=True):
        assert torch.allclose(one, other, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_operand_that_is_not_transposed_stays() -> None:
    inputs = [torch.randn(2048, 2048).bfloat16() for _ in range(2)]
    module = make_fx(lambda one, other: one.permute(0, 1) @ other, tracing_mode="fake")(*inputs)
    before = str(module.graph)
    GraphPass()(module.graph)
    assert str(module.graph) == before


def test_a_users_own_pass_stays_and_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(GraphPass):
        def __call__(self, graph: Any) -> None:
            seen.append(len(graph.nodes))

    seen: list[int] = []
    own = Own()
    monkeypatch.setattr("torch._inductor.config.post_grad_custom_post_pass", own)
    monkeypatch.setattr(graph_pass, "read_cpu_flags", lambda: AMX_FLAGS)
    ours = compiler_options()["post_grad_custom_post_pass"]
    assert torch._inductor.config.post_grad_custom_post_pass is own
    ours(torch.fx.symbolic_trace(nn.Linear(2, 2)).graph)
    assert seen
    assert GraphPass(own).uuid() != GraphPass().uuid()
    assert GraphPass([own, print]).uuid() is None
