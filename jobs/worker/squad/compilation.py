"""Whether the model's layers are compiled, and how: one graph for all layers and lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..runtime.errors import first_line

FEWEST_STEPS = 300
"""A shorter run is not compiled. Compilation takes about half a minute on a few cores, and in bf16
a step of DistilBERT then takes two thirds of its time: see docs/training.md."""


class Compilation(NamedTuple):
    """Whether layers are compiled, and why."""

    enabled: bool
    reason: str


def choose_compilation(asked: str, dtype: str, steps: int) -> Compilation:
    """What ``--compile`` means for a run of so many steps; whether a compiler is there is left open.

    It saves passes over memory between the matrix products. In fp32 these take nearly all of the
    time, and nothing is gained.
    """
    if asked != "auto":
        return Compilation(asked == "on", f"asked for with --compile {asked}")
    if dtype != "bf16":
        return Compilation(False, f"it does not pay in {dtype}")
    if steps < FEWEST_STEPS:
        return Compilation(False, f"it does not pay back within {steps} steps")
    return Compilation(True, f"it pays in bf16 from {FEWEST_STEPS} steps on")


def compile_layers(model: Any) -> int:
    """Have the layers of a model of transformers compiled at their first use; returns how many.

    Not the model as a whole: all layers share one graph, made in a sixth of the time (DistilBERT),
    and each layer's gradients are sent while those of the one before it are computed.
    """
    layers = find_layers(model)
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def count_compiled(model: Any) -> int:
    """How many layers :func:`compile_layers` has had compiled."""
    return sum(layer._compiled_call_impl is not None for layer in find_layers(model))


def plain_layers(model: Any) -> None:
    """Undo :func:`compile_layers`: evaluation would have to compile them anew."""
    for layer in find_layers(model):
        # What Module.compile sets; it has no opposite.
        layer._compiled_call_impl = None


def find_layers(model: Any) -> list[Any]:
    """The model's own layers: its longest list of modules."""
    lists = [list(each) for each in model.modules() if isinstance(each, nn.ModuleList)]
    return max(lists, key=len, default=[])


def why_no_compiler() -> str | None:
    """Why this machine can't compile, or None: found out by compiling something very small.

    It takes a C++ compiler, Python's headers and a folder for what it makes; only trying shows
    whether they fit together.
    """
    try:
        torch.compile(lambda x: x.cos() + 1, dynamic=False)(torch.ones(8))
    # Whatever the compiler, the file system or torch's own code raises: training works without.
    except Exception as error:
        # The compiler's own errors carry the reason inside.
        return first_line(getattr(error, "inner_exception", error))
    finally:
        torch._dynamo.reset()
    return None
