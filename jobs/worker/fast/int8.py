"""Products in int8 for compiled layers: outputs and input gradients. Weight gradients keep the layers' type.

Processors with int8 instructions (VNNI, AMX) multiply twice as fast in int8 as in bf16. Each row of the left
operand and each column of the right one has its own scale, and results are summed in int32. Weight gradients
add over thousands of tokens and are the products that suffer from such rounding (SwitchBack,
https://arxiv.org/abs/2304.13013).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 127
LEAST_SIZE = 256
"""Smaller products, such as those of adapters, are not worth the passes over their operands."""


class Int8Product(torch.autograd.Function):
    """``values weight^T + bias`` for values of (rows, inputs) and a weight of (outputs, inputs)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        result = multiply(values, weight.t())
        return (result if bias is None else result + bias).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight = ctx.saved_tensors
        of_values = multiply(gradient, weight).to(values.dtype)
        return of_values, gradient.t() @ values, gradient.sum(0)


class Int8Linear(nn.Linear):
    """A linear module that multiplies in int8 where it is compiled, so in training only."""

    def forward(self, values: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(values)
        dtype = values.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        rows, weight = values.reshape(-1, values.shape[-1]).to(dtype), self.weight.to(dtype)
        apply: Any = Int8Product.apply
        result: Tensor = apply(rows, weight, self.bias)
        return result.view(*values.shape[:-1], -1)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return a product in fp32, from operands that are rounded to int8."""
    (rows, scale), (columns, other) = _quantize(left, 1), _quantize(right, 0)
    return torch._int_mm(rows, columns) * scale * other


def _quantize(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return a matrix in int8, and what to multiply it by: one number for each row or column."""
    values = values.float()
    scale = values.abs().amax(dim, keepdim=True) / LARGEST
    # Of zeros only, the scale is zero as well.
    return (values * (1 / scale.clamp(min=1e-30))).round().to(torch.int8), scale


def use_int8(layers: Iterable[nn.Module]) -> None:
    """Let the large linear modules of layers that will be compiled multiply in int8."""
    for module in {each for layer in layers for each in layer.modules()}:
        if type(module) is nn.Linear and min(module.weight.shape) >= LEAST_SIZE:
            module.__class__ = Int8Linear  # with its parameters and hooks


def stop_using_int8(model: nn.Module) -> None:
    """Undo :func:`use_int8`."""
    for module in model.modules():
        if type(module) is Int8Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
