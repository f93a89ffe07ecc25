"""Products in int8 for compiled layers: outputs and input gradients. Weight gradients keep the layers' type.

Processors with int8 instructions (VNNI, AMX) multiply twice as fast in int8 as in bf16. Each token and each
output of a weight has its own scale; sums are in int32. Weight gradients add over thousands of tokens and are
the products that suffer from such rounding (SwitchBack, https://arxiv.org/abs/2304.13013).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LARGEST = 127
LEAST_SIZE = 256
"""Smaller products, such as those of adapters, are not worth the passes over their operands."""


class Rounded(NamedTuple):
    """A weight in int8: ``values`` of (outputs, inputs), times ``scale`` of (outputs, 1)."""

    values: Tensor
    scale: Tensor


class Int8Product(torch.autograd.Function):
    """``values weight^T + bias`` for values of (rows, inputs); the weight itself only gets its gradient."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, _: Tensor, bias: Tensor | None, *rounded: Tensor
    ) -> Tensor:
        ctx.save_for_backward(values, *rounded)
        weight, scale = rounded
        result = _multiply(values, weight.t()) * scale.t()
        return (result if bias is None else result + bias).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight, scale = ctx.saved_tensors
        of_values = _multiply(gradient * scale.t(), weight).to(values.dtype)
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return of_values, gradient.t() @ values, of_bias, None, None


class Int8Linear(nn.Linear):
    """A linear module that multiplies in int8 where it is compiled, so in training only.

    ``rounded`` is a frozen weight; others are rounded in each step.
    """

    rounded: Rounded | None

    def forward(self, values: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(values)
        dtype = values.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        rows, weight = values.reshape(-1, values.shape[-1]).to(dtype), self.weight.to(dtype)
        apply: Any = Int8Product.apply
        result: Tensor = apply(
            rows, weight, self.bias, *(self.rounded or round_rows(weight.detach()))
        )
        return result.view(*values.shape[:-1], -1)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return a product in fp32, of a matrix that is rounded by rows and one in int8."""
    rows, scale = round_rows(left)
    result: Tensor = torch._int_mm(rows, right) * scale
    return result


def round_rows(values: Tensor) -> Rounded:
    """Return a matrix in int8, and what to multiply each row by."""
    values = values.float()
    scale = values.abs().amax(1, keepdim=True) / LARGEST
    # Of zeros only, the scale is zero as well.
    return Rounded((values * (1 / scale.clamp(min=1e-30))).round().to(torch.int8), scale)


def use_int8(layers: Iterable[nn.Module]) -> None:
    """Let the large linear modules of layers that will be compiled multiply in int8."""
    for module in (each for layer in layers for each in layer.modules()):
        if type(module) is nn.Linear and min(module.weight.shape) >= LEAST_SIZE:
            module.__class__ = Int8Linear  # with its parameters and hooks
            frozen = not module.weight.requires_grad
            vars(module)["rounded"] = round_rows(module.weight.detach()) if frozen else None


def stop_using_int8(model: nn.Module) -> None:
    """Undo :func:`use_int8`."""
    for module in model.modules():
        if type(module) is Int8Linear:
            del module.rounded
            module.__class__ = nn.Linear  # type: ignore[assignment]
