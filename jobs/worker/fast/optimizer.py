"""AdamW for compiled layers, with weights in bf16: the same result from fewer passes over memory.

Products in bf16 read weights in bf16 and return gradients in bf16. With fp32 weights, autocast converts the
weights in every step, and their gradients as well. Here, the layers have bf16 weights, and the optimizer has
their fp32 masters. For each weight, a step moves 30 bytes instead of 44.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from .compilation import find_layers
from .int8 import Int8Linear
from .layers import number_layers

Masters = Mapping[nn.Parameter, nn.Parameter]
"""The fp32 master of each bf16 weight."""
BETAS, EPSILON = (0.9, 0.999), 1e-8
CHUNK = 1 << 14
"""Numbers that a thread takes at a time. Sums of squares are added in the order of the chunks, so they do not
depend on the number of threads."""
KEPT = "_masters"
"""The attribute of a model with its masters."""
_ADDRESSES = ("master", "mean", "square", "gradient", "weight")
_NUMBERS = ("rate", "root", "kept")
_PART = np.dtype(
    [(name, "u8") for name in _ADDRESSES] + [(name, "f4") for name in _NUMBERS], align=True
)
_CHUNK = np.dtype([("part", "i8"), ("first", "i8"), ("end", "i8")])
_SOURCE = """
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr float new_mean = 1 - BETA1, old_square = BETA2, new_square = 1 - BETA2, epsilon = EPSILON;

struct Part {  // of a parameter in fp32, weight is null
    float *master, *mean, *square;
    const void *gradient;
    uint16_t *weight;
    float rate, root, kept;  // kept by weight decay
};
struct Chunk { int64_t part, first, end; };

static inline float widen(uint16_t half) {
    uint32_t bits = uint32_t(half) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t narrow(float value) {  // to the nearest, or the even one
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static inline float read(const float *values, int64_t i) { return values[i]; }
static inline float read(const uint16_t *values, int64_t i) { return widen(values[i]); }

template <typename T> static double sum_squares(const T *gradient, int64_t first, int64_t end) {
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < end; i++) sum += read(gradient, i) * read(gradient, i);
    return sum;
}
template <typename T>
static void update(const Part &part, const T *gradient, int64_t first, int64_t end, float scale) {
    float *master = part.master, *mean = part.mean, *square = part.square;
    #pragma omp simd
    for (int64_t i = first; i < end; i++) {
        float value = read(gradient, i) * scale;
        mean[i] += (value - mean[i]) * new_mean;
        square[i] = old_square * square[i] + new_square * value * value;
        float step = part.rate * mean[i] / (std::sqrt(square[i]) * part.root + epsilon);
        master[i] = master[i] * part.kept - step;
    }
    if (part.weight)
        #pragma omp simd
        for (int64_t i = first; i < end; i++) part.weight[i] = narrow(master[i]);
}
extern "C" void sums(const Part *parts, const Chunk *chunks, int64_t count, double *result) {
    #pragma omp parallel for
    for (int64_t n = 0; n < count; n++) {
        const Part &part = parts[chunks[n].part];
        result[n] = part.weight
            ? sum_squares((const uint16_t *)part.gradient, chunks[n].first, chunks[n].end)
            : sum_squares((const float *)part.gradient, chunks[n].first, chunks[n].end);
    }
}
extern "C" void step(const Part *parts, const Chunk *chunks, int64_t count, float scale) {
    #pragma omp parallel for
    for (int64_t n = 0; n < count; n++) {
        const Part &part = parts[chunks[n].part];
        if (part.weight)
            update(part, (const uint16_t *)part.gradient, chunks[n].first, chunks[n].end, scale);
        else
            update(part, (const float *)part.gradient, chunks[n].first, chunks[n].end, scale);
    }
}
"""


def halve_weights(model: Any) -> Masters:
    """Convert the trained weights of the layers' linear modules to bf16, and return their masters.

    The model's state remains that of an fp32 model, for checkpoints.
    """
    masters = {
        cast(nn.Parameter, module.weight): nn.Parameter(module.weight.data)
        for layer in find_layers(model)
        for module in layer.modules()
        if type(module) in (nn.Linear, Int8Linear)
        and module.weight.requires_grad
        and module.weight.dtype == torch.float32
    }
    every = model.named_parameters(remove_duplicate=False)
    named = {name: masters[each] for name, each in every if each in masters}
    for weight, master in masters.items():
        weight.data = master.data.bfloat16()

    def save(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state.update({prefix + name: master.data for name, master in named.items()})

    def load(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, master in named.items():
            if prefix + name in state:
                master.data.copy_(state[prefix + name])

    hooks = model.register_state_dict_post_hook(save), model.register_load_state_dict_pre_hook(load)
    setattr(model, KEPT, (masters, hooks))
    return masters


def restore_weights(model: Any) -> None:
    """Undo :func:`halve_weights`; the layers get the masters as trained so far."""
    masters, hooks = vars(model).pop(KEPT, ({}, ()))
    for hook in hooks:
        hook.remove()
    for weight, master in masters.items():
        weight.grad, weight.data = None, master.data


def group_parameters(
    model: Any,
    weight_decay: float,
    layer_decay: float = 1.0,
    masters: Masters = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return an optimizer's groups of a model's trained parameters, or of their masters.

    Biases and the weights of norms, which have one dimension, do not decay. ``scale`` is a group's part of
    the learning rate: it falls by ``layer_decay`` with each layer below the head.
    """
    depths, head = number_layers(model)
    groups: dict[Any, dict[str, Any]] = {}
    for each, depth in depths.items():
        if each.requires_grad:
            scale = layer_decay ** (head - depth)
            decay = weight_decay if each.dim() > 1 else 0.0
            empty = {"params": [], "weight_decay": decay, "scale": scale}
            groups.setdefault((decay, scale), empty)["params"].append(masters.get(each, each))
    return list(groups.values())


class MasterAdamW(torch.optim.AdamW):
    """AdamW for bf16 weights with their masters and for parameters in fp32.

    Its own parameters are the masters in place of the weights, so its state is that of fp32 training. Its
    gradients are clipped to the norm ``most``. Raises ``ValueError`` for a parameter of another type.
    """

    def __init__(
        self,
        model: Any,
        masters: Masters,
        rate: float,
        most: float,
        weight_decay: float = 0.0,
        layer_decay: float = 1.0,
    ) -> None:
        self._trained = {
            each: masters.get(each, each) for each in model.parameters() if each.requires_grad
        }
        if found := {each.dtype for each in self._trained.values()} - {torch.float32}:
            raise ValueError(f"trained parameters must be in fp32, not in {found}")
        groups = group_parameters(model, weight_decay, layer_decay, masters)
        super().__init__(groups, rate, BETAS, EPSILON, weight_decay=0.0)
        self._most = most

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for each in self._trained:
            each.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> float:  # type: ignore[override]
        """Update all parameters with gradients, unless their norm is not finite; return the norm."""
        used = [(each, own) for each, own in self._trained.items() if each.grad is not None]
        for each, own in used:
            assert each.grad is not None
            if each.grad.stride() != own.stride():  # the kernels go through memory
                each.grad = torch.empty_like(each).copy_(each.grad)
        parts, chunks = np.zeros(len(used), _PART), _cut(tuple(own.numel() for _, own in used))
        parts["gradient"] = [each.grad.data_ptr() for each, _ in used if each.grad is not None]
        parts["weight"] = [0 if each is own else each.data_ptr() for each, own in used]
        arguments = parts.ctypes, chunks.ctypes, ctypes.c_int64(len(chunks))
        squares = np.empty(len(chunks))
        _kernels().sums(*arguments, squares.ctypes)
        norm = math.sqrt(squares.sum())
        if math.isfinite(norm):
            self._fill(parts, [own for _, own in used])
            _kernels().step(*arguments, ctypes.c_float(min(1.0, self._most / max(norm, 1e-6))))
        return norm

    def _fill(self, parts: Any, parameters: list[nn.Parameter]) -> None:
        """Count the step, and give the kernel the parameters' state and rates."""
        states = [self.state[each] for each in parameters]
        for each, state in zip(parameters, states):  # noqa: B905 - 3.8
            if not state:
                averages = {name: torch.zeros_like(each) for name in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.zeros(()), **averages)
        torch._foreach_add_([state["step"] for state in states], 1)
        # Not before: loading a checkpoint replaces the groups.
        groups = {each: group for group in self.param_groups for each in group["params"]}
        rates = np.array([groups[each]["lr"] for each in parameters])
        decays = np.array([groups[each]["weight_decay"] for each in parameters])
        steps = [int(state["step"]) for state in states]
        mean, square = (1 - beta ** np.array(steps, float) for beta in BETAS)
        parts["rate"], parts["root"] = rates / mean, square**-0.5
        parts["kept"] = 1 - rates * decays
        parts["master"] = [each.data_ptr() for each in parameters]
        parts["mean"] = [state["exp_avg"].data_ptr() for state in states]
        parts["square"] = [state["exp_avg_sq"].data_ptr() for state in states]


@lru_cache(1)
def _cut(sizes: tuple[int, ...]) -> Any:
    """Return the chunks of parts with these sizes."""
    found = [
        (part, first, min(first + CHUNK, size))
        for part, size in enumerate(sizes)
        for first in range(0, size, CHUNK)
    ]
    return np.array(found, _CHUNK)


@lru_cache(None)
def _kernels() -> Any:
    from torch._inductor.codecache import CppCodeCache  # noqa: PLC0415 - importing it takes a second

    names = {"BETA1": BETAS[0], "BETA2": BETAS[1], "EPSILON": EPSILON}
    defined = "".join(f"#define {name} {value}\n" for name, value in names.items())
    # The compiler's own code is vectorized already. Roots that may set errno would not be.
    flags = ("-ftree-loop-vectorize", "-fno-math-errno")
    return CppCodeCache.load(defined + _SOURCE, extra_flags=flags)
