"""Compilation of the model's layers: one graph for all of them, and another for long batches.

Dropout in them gets a mask that costs little more than the product with it. Compiled, torch's own draws each
number from Philox without vector instructions: with LayerNorm behind it, one dropout of DistilBERT takes
68 ms per batch of 16 instead of 5 (one core, AVX-512; without dropout 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..runtime.errors import first_line
from ..runtime.precision import AMX_FLAGS, read_cpu_flags
from .attention import stop_using_products, use_products

FEWEST_STEPS = 300
"""Shorter runs are not compiled. Compilation takes about half a minute on a few cores, and makes a bf16
step of DistilBERT a third faster: see docs/speed.md."""
GOLDEN = 0x9E3779B9 - 2**32
_New = TypeVar("_New", bound=nn.Module)


class Compilation(NamedTuple):
    """Whether layers are compiled, and why."""

    enabled: bool
    reason: str


def choose_compilation(asked: str, dtype: str, steps: int) -> Compilation:
    """Return what ``--compile`` means for a run of ``steps`` steps, if there is a compiler.

    It saves passes over memory between the matrix products, which take nearly all the time in fp32.
    """
    if asked != "auto":
        return Compilation(asked == "on", f"set by --compile {asked}")
    if dtype != "bf16":
        return Compilation(False, f"it does not speed up {dtype}")
    if steps < FEWEST_STEPS:
        return Compilation(False, f"{steps} steps are too few to pay for it")
    return Compilation(True, f"it speeds up bf16 and pays off from {FEWEST_STEPS} steps")


def compile_layers(model: Any, *, shared: bool = False) -> int:
    """Mark the layers of a model to be compiled at their first use, and return their number.

    They get a dropout and, where that gives the same answers, an attention that suit compilation.

    Not the whole model: all layers share one graph, compiled in a sixth of the time (DistilBERT), and
    each layer's gradients are sent while those of the layer before it are computed. Nothing is left to
    hide the transfer of the first layer's. With ``shared`` gradients it is compiled in parts, so that
    those of all but the first part are sent while the first part's are computed.
    """
    layers, dropouts = find_layers(model), replace_dropouts(model)
    use_products(model)
    if read_cpu_flags() >= AMX_FLAGS:
        # Importing the compiler takes a second.
        from .weight_gradients import use_faster_weight_gradients  # noqa: PLC0415

        use_faster_weight_gradients()
    units = [*layers[0].children(), *layers[1:]] if shared and layers else layers
    inside = {id(module) for unit in units for module in unit.modules()}
    for module in (*units, *(each for each in dropouts if id(each) not in inside)):
        module.compile(dynamic=True)
    return len(layers)


def count_compiled(model: Any) -> int:
    """Return the number of layers that :func:`compile_layers` marked."""
    return sum(
        any(module._compiled_call_impl is not None for module in layer.modules())
        for layer in find_layers(model)
    )


def plain_layers(model: Any) -> None:
    """Undo :func:`compile_layers`: evaluation would have to compile them again."""
    restore_dropouts(model)
    stop_using_products(model)
    for module in model.modules():
        # Module.compile sets it, and has no inverse.
        module._compiled_call_impl = None


def find_layers(model: Any) -> list[Any]:
    """Return the model's layers: its longest list of modules."""
    lists = [list(each) for each in model.modules() if isinstance(each, nn.ModuleList)]
    return max(lists, key=len, default=[])


def why_no_compiler() -> str | None:
    """Compile a tiny function; return why this machine can't, or None.

    Compilation needs a matching C++ compiler, Python headers, and a folder; only a trial shows whether they
    work.
    """
    try:
        torch.compile(lambda x: x.cos() + 1, dynamic=False)(torch.ones(8))
    # The compiler, the file system, and torch raise many types; training works without compilation.
    except Exception as error:
        # The compiler's errors carry the reason inside.
        return first_line(getattr(error, "inner_exception", error))
    finally:
        torch._dynamo.reset()
    return None


class HashDropout(nn.Module):
    """Dropout of elements by a hash of their position and ``seed``, an int32 tensor without dimensions.

    The backward pass computes the mask again instead of reading it. Each call leaves another seed, because
    layers may share a dropout, as ALBERT's do.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        # Not a buffer: DistributedDataParallel would give all ranks the first one's.
        self.seed = torch.zeros((), dtype=torch.int32)

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return values
        seed = self.seed
        # Multiples of the golden ratio are far apart. Not in place: the backward pass needs the old seed.
        self.seed = seed + GOLDEN
        # The rounds of https://github.com/skeeto/hash-prospector's triple32: with two, there are correlations
        # between neighbors (benchmarks.dropout_hash). The seed comes twice: if it were only added, all masks
        # would be parts of one sequence.
        mixed = torch.arange(values.numel(), dtype=torch.int32).view(values.shape) + seed
        mixed = ((mixed ^ _shift(mixed, 17)) * (0xED5AD4BB - 2**32)) ^ (seed * GOLDEN)
        mixed = (mixed ^ _shift(mixed, 11)) * (0xAC4C1B51 - 2**32)
        mixed = (mixed ^ _shift(mixed, 15)) * 0x31848BAB
        keep = mixed >= int(self.p * 2**32) - 2**31
        return torch.where(keep, values * (1 / (1 - self.p)), 0.0)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift int32 to the right, filled with zeros: with the sign, x and ~x would have the same hash."""
    return (values >> bits) & ((1 << (32 - bits)) - 1)


def replace_dropouts(model: nn.Module) -> list[HashDropout]:
    """Replace each dropout with a :class:`HashDropout`, and return them."""
    return _replace(model, lambda each: type(each) is nn.Dropout and 0 < each.p < 1, HashDropout)


def restore_dropouts(model: nn.Module) -> None:
    """Undo :func:`replace_dropouts`."""
    _replace(model, lambda each: isinstance(each, HashDropout), nn.Dropout)


def draw_seeds(model: nn.Module) -> None:
    """Seed the next forward pass's dropout from torch's generator, whose state checkpoints contain."""
    own = [each for each in model.modules() if isinstance(each, HashDropout)]
    least = torch.iinfo(torch.int32).min
    for module, seed in zip(own, torch.randint(least, -least, (len(own),), dtype=torch.int32)):  # noqa: B905 - 3.8
        module.seed.copy_(seed)


def _replace(
    model: nn.Module, is_old: Callable[[Any], bool], make: Callable[[float], _New]
) -> list[_New]:
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if is_old(child)
    ]
    made = [make(float(child.p)) for _, _, child in found]  # type: ignore[arg-type]
    for (module, name, child), new in zip(found, made):  # noqa: B905 - 3.8
        setattr(module, name, new.train(child.training))
    return made
