"""Compilation of the model's layers: one graph for all of them, and another for long batches."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from getpass import getuser
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import nn

from ..runtime.errors import first_line
from ..runtime.precision import read_cpu_flags
from .attention import stop_using_products, use_products
from .dropout import replace_dropouts, restore_dropouts
from .int8 import stop_using_int8, use_int8

LEAST_TFLOP = 200
"""Runs in which each rank computes less are not compiled.

Compilation takes half a minute, and saves a quarter of a bf16 step of DistilBERT. Without AMX, it pays from
30 TFLOP on one core and 60 on two (benchmarks/log.jsonl). Faster ranks need more, so this is higher. Neither
the number of cores nor measured times decide: a run that resumes on another machine could train with other
dropout.
"""

FAST = "_fast_layers"
"""The attribute of a model with its :class:`.first_batches.FastLayers`."""
COMPILED = Path("~/.cache/spr-cluster/compiled")
"""Where a node keeps compiled code."""
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_CACHE_CUSTOM_FUNCTIONS = "autograd_cache_allow_custom_autograd_functions"
_NUMBERS = "specialize_float"


class Compilation(NamedTuple):
    """Whether layers are compiled, and why."""

    enabled: bool
    reason: str


def estimate_tflop(model: Any, tokens: float) -> float:
    """Return the operations to train a model's layers on so many tokens, in 10^12.

    Each token takes two for each weight in the forward pass, and four in the backward pass.
    """
    layers = find_layers(model)
    weights: int = sum(
        each.numel() for layer in layers for each in layer.parameters() if each.dim() > 1
    )
    # ALBERT calls one layer several times.
    calls: int = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    return 6 * weights * max(1, calls / max(1, len(layers))) * tokens / 1e12


def choose_compilation(asked: str, dtype: str, tflop: float) -> Compilation:
    """Return what ``--compile`` means for a run of ``tflop`` per rank, if there is a compiler.

    It saves passes over memory between the matrix products, which take nearly all the time in fp32.
    """
    if asked != "auto":
        return Compilation(asked == "on", f"set by --compile {asked}")
    if dtype == "fp32":
        return Compilation(False, f"it does not speed up {dtype}")
    if tflop < LEAST_TFLOP:
        why = f"{tflop:.1f} TFLOP per rank, at least {LEAST_TFLOP} needed"
        return Compilation(False, f"the run is too short to pay for it ({why})")
    return Compilation(True, f"the run is long enough to pay for it ({tflop:.0f} TFLOP per rank)")


def keep_compiled(root: Path) -> None:
    """Keep compiled code where later jobs find it, also after a reboot or in a machine made from an image.

    By default, torch keeps it in ``/tmp``, and does not cache graphs with custom autograd functions.
    """
    # It is for this processor's instructions, which torch's own keys leave out.
    processor = hashlib.sha256(" ".join(sorted(read_cpu_flags())).encode()).hexdigest()[:12]
    # Without a home folder, a user, or a compiler.
    with suppress(OSError, RuntimeError, KeyError, ImportError):
        folder = root.expanduser() / processor
        folder.mkdir(parents=True, exist_ok=True)
        # The import of transformers' Trainer sets it to torch's default.
        given = os.environ.get(_FOLDER, "")
        if os.access(folder, os.W_OK) and given in (
            "",
            f"{gettempdir()}/torchinductor_{getuser()}",
        ):
            os.environ[_FOLDER] = str(folder)
            _keep_headers(folder)
    if hasattr(torch._functorch.config, _CACHE_CUSTOM_FUNCTIONS):  # not in older releases
        setattr(torch._functorch.config, _CACHE_CUSTOM_FUNCTIONS, True)


def _keep_headers(folder: Path) -> None:
    """Keep precompiled headers, 150 MB, in the same folder.

    torch keeps them in ``/tmp``. If they are missing, it compiles them, for 6 s of CPU time, even if all else
    is in its cache.
    """
    from torch._inductor import codecache  # noqa: PLC0415 - takes a second

    if hasattr(codecache, "_HEADER_DIR"):  # not in older releases
        headers = folder / "precompiled_headers"
        codecache._HEADER_DIR = str(headers)
        codecache._HEADER_LOCK_DIR = str(headers / "locks")


def compile_layers(model: Any, *, shared: bool = False, int8: bool = False) -> int:
    """Mark the layers of a model to be compiled at their first use, and return their number.

    They get a dropout and, where that gives the same outputs, an attention that suit compilation.

    Not the whole model: all layers share one graph, compiled in a sixth of the time (DistilBERT), and
    each layer's gradients are sent while those of the layer before it are computed. Nothing is left to
    hide the transfer of the first layer's. With ``shared`` gradients it is compiled in parts, so that
    those of all but the first part are sent while the first part's are computed.
    """
    # By default, dynamic graphs first trace each number, such as a dropout's p, as a variable, and then
    # everything again, because some must be constants.
    if hasattr(torch._dynamo.config, _NUMBERS):  # not in older releases
        setattr(torch._dynamo.config, _NUMBERS, True)
    use_products(model)
    layers, dropouts = find_layers(model), replace_dropouts(model)
    if int8:
        use_int8(layers)
    # Importing the compiler takes a second.
    from .graph_pass import compiler_options  # noqa: PLC0415

    options = compiler_options()
    units = [*layers[0].children(), *layers[1:]] if shared and layers else layers
    inside = {id(module) for unit in units for module in unit.modules()}
    for module in (*units, *(each for each in dropouts if id(each) not in inside)):
        module.compile(dynamic=True, options=options)
    return len(layers)


def count_compiled(model: Any) -> int:
    """Return the number of layers that :func:`compile_layers` marked."""
    return sum(
        any(module._compiled_call_impl is not None for module in layer.modules())
        for layer in find_layers(model)
    )


def is_compiled(model: Any) -> bool:
    """Return whether a script has compiled a model or a part of it."""
    return any(each._compiled_call_impl or "_orig_mod" in each._modules for each in model.modules())


def plain_layers(model: Any, attention: str | None = None) -> None:
    """Undo :func:`compile_layers`: evaluation would have to compile them again."""
    if fast := vars(model).get(FAST):
        for each in fast.hooks:
            each.remove()
    restore_dropouts(model)
    stop_using_int8(model)
    stop_using_products(model, attention)
    for module in model.modules():
        # Module.compile sets it, and has no inverse.
        module._compiled_call_impl = None


def find_layers(model: Any) -> list[Any]:
    """Return the model's layers: its longest list of modules."""
    return _find_list(model)[1]


def way_to_layers(model: Any) -> list[Any]:
    """Return the modules around the layers, from the model to the owner of their list."""
    names = _find_list(model)[0].split(".")[:-1]
    return [model.get_submodule(".".join(names[:count])) for count in range(len(names) + 1)]


def _find_list(model: Any) -> tuple[str, list[Any]]:
    named = model.named_modules()
    lists = [(name, list(each)) for name, each in named if isinstance(each, nn.ModuleList)]
    return max(lists, key=lambda each: len(each[1]), default=("", []))


def why_no_compiler() -> str | None:
    """Compile a tiny function; return why this machine can't, or None.

    Compilation needs a matching C++ compiler, Python headers, and a folder; only a trial shows whether they
    work.
    """
    trouble = None
    for knows_all in (True, None):
        _trust_compiler(knows_all)
        try:
            torch.compile(lambda x: x.cos() + 1, dynamic=False)(torch.ones(8))
        # The compiler, the file system, and torch raise many types; training works without compilation.
        except Exception as error:
            # The compiler's errors carry the reason inside.
            trouble = first_line(getattr(error, "inner_exception", error))
        else:
            return None
        finally:
            torch._dynamo.reset()
    return trouble


def _trust_compiler(knows_all: bool | None) -> None:
    """Set whether the compiler knows all instructions of this processor, as nearly all do.

    With None, torch finds out: every process loads seven libraries, or builds them if they are not in the
    cache, which takes 1 s or 7.
    """
    with suppress(ImportError):  # older releases
        from torch._inductor import config, cpu_vec_isa  # noqa: PLC0415 - takes a second

        config.cpp.vec_isa_ok = knows_all
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
