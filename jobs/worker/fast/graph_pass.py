"""A pass over the graphs of compiled layers, for faster products with AMX.

The gradient of a weight is ``output_gradient^T input``. With AMX, oneDNN multiplies a transposed first
operand in bf16 at half its usual speed, so copying the smaller operand first pays off. Products with the same
input, such as those of attention's query, key, and value, become one. Both need a large result: oneDNN
multiplies small ones faster as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ..runtime.precision import AMX_FLAGS, read_cpu_flags

aten = torch.ops.aten
_COPIES = {
    *(aten.view.default, aten.reshape.default, aten.permute.default, aten.clone.default),
    torch.ops.prims.convert_element_type.default,
}
LEAST_ROWS = 1536
"""At 1,024 rows of 768 columns, the copy makes a product slower; at 1,536 it takes 0.64 of the time."""


@functools.cache
def _compile_transpose() -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda values: values.t().contiguous(), dynamic=True)


# Not part of the layer's graph, where a fused kernel would write its result transposed and take longer.
@torch.library.custom_op("spr::transpose", mutates_args=())
def transpose(values: Tensor) -> Tensor:
    """Return a transposed copy of a matrix. torch's own takes up to five times as long."""
    return _compile_transpose()(values)


@transpose.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty((values.shape[1], values.shape[0]))


class GraphPass(CustomGraphPass):
    """Rewrites the products of weight gradients, behind the user's ``others``."""

    def __init__(self, others: Any = None) -> None:
        self._others = others if isinstance(others, (list, tuple)) else [others] if others else []

    def __call__(self, graph: Any) -> None:
        for each in self._others:
            each(graph)
        from torch._inductor.pattern_matcher import (  # noqa: PLC0415 - warns if it is not loaded yet
            stable_topological_sort,
        )

        _rewrite_weight_gradients(graph)
        stable_topological_sort(graph)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Return what identifies this pass in torch's cache of compiled graphs."""
        found = [
            each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._others
        ]
        # Without, torch does not cache.
        return None if None in found else get_hash_for_files((__file__,), str(found))


class _Builder:
    """Adds operations to a graph, with the shapes that the compiler needs."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __call__(self, operation: Any, *args: Any) -> Any:
        node = self._graph.call_function(operation, args)
        node.meta["val"] = operation(*torch.fx.node.map_arg(args, lambda each: each.meta["val"]))
        return node


def _rewrite_weight_gradients(graph: Any) -> None:
    by_input: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        if _is_weight_gradient(node):
            by_input.setdefault(node.args[1], []).append(node)
    for values, products in by_input.items():
        rows = sum(each.meta["val"].shape[0] for each in products)
        columns = products[0].meta["val"].shape[1]
        if max(rows, columns) < LEAST_ROWS or not all(map(_only_leaves, products)):
            continue
        with graph.inserting_before(products[-1]):
            new = _Builder(graph)
            if len(products) > 1:
                _join(new, products, values)
            else:
                _copy_smaller(new, products[0], copy_input=rows > columns)


def _is_weight_gradient(node: Any) -> bool:
    if node.op != "call_function" or node.target is not aten.mm.default:
        return False
    value, first = node.meta.get("val"), node.args[0]
    if value is None or value.dtype != torch.bfloat16:
        return False
    is_fixed = all(isinstance(size, int) for size in value.shape)
    is_permuted = first.op == "call_function" and first.target is aten.permute.default
    return is_fixed and is_permuted and [each % 2 for each in first.args[1]] == [1, 0]


def _only_leaves(product: Any) -> bool:
    """Return whether only copies are made of a product. Joining others could make a circle."""
    reached, waiting = set(), [product]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and user.target not in _COPIES:
                return False
            if user not in reached:
                reached.add(user)
                waiting.append(user)
    return True


def _copy_smaller(new: _Builder, product: Any, *, copy_input: bool) -> None:
    transposed, values = product.args
    gradient = transposed.args[0]
    if copy_input:
        result = new(aten.mm.default, new(torch.ops.spr.transpose.default, values), gradient)
        result = new(aten.permute.default, result, [1, 0])
    else:
        result = new(aten.mm.default, new(torch.ops.spr.transpose.default, gradient), values)
    product.replace_all_uses_with(result)


def _join(new: _Builder, products: list[Any], values: Any) -> None:
    gradients = new(aten.cat.default, [each.args[0] for each in products], 0)
    result, begin = new(aten.mm.default, gradients, values), 0
    for product in products:
        end = begin + product.meta["val"].shape[0]
        product.replace_all_uses_with(new(aten.slice.Tensor, result, 0, begin, end))
        begin = end


def compiler_options() -> dict[str, Any]:
    """Return options for torch's compiler: with AMX, the pass behind the one that is set for all graphs.

    Random numbers are those of eager mode, so that results can be compared.
    """
    options: dict[str, Any] = {"fallback_random": True}
    if read_cpu_flags() >= AMX_FLAGS:
        options["post_grad_custom_post_pass"] = GraphPass(config.post_grad_custom_post_pass)
    return options
