"""Dropout for compiled layers: a mask that costs little more than the product with it.

Compiled, torch's own draws each number from Philox without vector instructions: with LayerNorm behind it, one
dropout of DistilBERT takes 68 ms per batch of 16 instead of 5 (one core, AVX-512; without dropout 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

GOLDEN = 0x9E3779B9 - 2**32
_New = TypeVar("_New", bound=nn.Module)


def keep_mask(shape: Sequence[int], seed: Tensor, p: float) -> Tensor:
    """Return which elements a dropout keeps, a share of ``1 - p``: a hash of their position and the seed.

    ``seed`` is an int32 tensor without dimensions.
    """
    # The rounds of https://github.com/skeeto/hash-prospector's triple32: with two, there are correlations
    # between neighbors (benchmarks.dropout_hash). The seed comes twice: if it were only added, all masks
    # would be parts of one sequence.
    mixed = torch.arange(math.prod(shape), dtype=torch.int32).view(*shape) + seed
    mixed = ((mixed ^ _shift(mixed, 17)) * (0xED5AD4BB - 2**32)) ^ (seed * GOLDEN)
    mixed = (mixed ^ _shift(mixed, 11)) * (0xAC4C1B51 - 2**32)
    mixed = (mixed ^ _shift(mixed, 15)) * 0x31848BAB
    return mixed >= int(p * 2**32) - 2**31


class HashDropout(nn.Dropout):
    """Dropout by :func:`keep_mask`. The backward pass computes the mask again instead of reading it.

    Copies and pickles are torch's own dropouts.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)
        # Not a buffer: DistributedDataParallel would give all ranks the first one's.
        self.seed = _draw()

    def __reduce__(self) -> Any:
        own = ("seed", "_compiled_call_impl")
        return nn.Dropout, (), {n: each for n, each in vars(self).items() if n not in own}

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or not self.p:
            return values
        if self.p == 1:
            return values * 0.0
        keep = keep_mask(values.shape, self.next_seed(), self.p)
        return torch.where(keep, values * (1 / (1 - self.p)), 0.0)

    def next_seed(self) -> Tensor:
        """Return the seed for one call.

        Each gets another: layers may share a dropout, as ALBERT's do.
        """
        seed = self.seed
        # Multiples of the golden ratio are far apart. Not in place: the backward pass needs the old seed.
        self.seed = seed + GOLDEN
        return seed


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift int32 to the right, filled with zeros: with the sign, x and ~x would have the same hash."""
    return (values >> bits) & ((1 << (32 - bits)) - 1)


def replace_dropouts(model: nn.Module) -> list[HashDropout]:
    """Replace each dropout with a :class:`HashDropout`, and return them."""
    return replace_modules(
        model,
        lambda each: type(each) is nn.Dropout and 0 < each.p < 1,
        lambda each: HashDropout(each.p),
    )


def restore_dropouts(model: nn.Module) -> None:
    """Undo :func:`replace_dropouts`."""
    replace_modules(
        model, lambda each: isinstance(each, HashDropout), lambda each: nn.Dropout(each.p)
    )


def draw_seeds(model: nn.Module) -> None:
    """Seed the next forward pass's dropout from torch's generator, whose state checkpoints contain."""
    own = [each for each in model.modules() if isinstance(each, HashDropout)]
    for module, seed in zip(own, _draw(len(own))):  # noqa: B905 - 3.8
        module.seed.copy_(seed)


def _draw(*shape: int) -> Tensor:
    least = torch.iinfo(torch.int32).min
    return torch.randint(least, -least, shape, dtype=torch.int32)


@contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Restore after a ``with`` block which modules train: a script may have frozen some in evaluation."""
    modes = [(each, each.training) for each in model.modules()]
    try:
        yield
    finally:
        model.train(modes[0][1])  # some modules do more in it, such as LoRA's that merge weights
        for each, training in modes:
            each.training = training


def replace_modules(
    model: nn.Module, is_old: Callable[[Any], bool], make: Callable[[Any], _New]
) -> list[_New]:
    """Replace a model's modules by what ``make`` returns for each, and return the new ones."""
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if is_old(child)
    ]
    made = [make(child) for _, _, child in found]
    for (module, name, child), new in zip(found, made):  # noqa: B905 - 3.8
        setattr(module, name, new.train(child.training))
    return made
