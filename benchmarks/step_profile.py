"""Where the time of training steps goes: matrix products, and everything else by group.

torch's profiler gives the seconds of each operation; compiled kernels carry the operations in their names.
A fused kernel belongs to the first group of :data:`GROUPS` that it holds an operation of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

PRODUCTS = "products"
PYTHON = "Python and gaps"
GROUPS = {
    PRODUCTS: r"^aten::(mm|addmm|bmm|baddbmm)$|^mkldnn::_?linear",
    "attention": r"scaled_dot_product|softmax",
    "normalization and dropout fused with it": r"layer_norm",
    "dropout and random numbers": r"bernoulli|dropout|rand|rshift",
    "GELU": r"gelu|erf|clamp_full_like",  # by polynomials
    "embedding": r"embedding|index_add|index_put",
    "optimizer and clipping": r"(?i)adamw|linalg_vector_norm|foreach|aten::mul_$",
    "communication": r"c10d|gloo|all_?reduce",
    "elementwise, copies, sums": r"",
}


class Product(NamedTuple):
    """One matrix product: its seconds, the bytes of its operands and result, and its operations."""

    seconds: float
    bytes: int
    operations: int


class StepProfile(NamedTuple):
    """What a few steps' operations took, in seconds."""

    groups: dict[str, float]
    products: list[Product]

    @staticmethod
    def parse(content: Sequence[Any]) -> StepProfile:
        """Return what JSON makes of a profile."""
        groups, products = content
        return StepProfile(groups, [Product(*each) for each in products])

    @property
    def outside(self) -> float:
        """The seconds outside matrix products."""
        return sum(self.groups.values()) - self.groups[PRODUCTS]


def profile_steps(train: Callable[[], float], element_bytes: int) -> StepProfile:
    """Profile steps; ``train`` takes them, and returns the seconds from the first to the last one."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        seconds = train()
    return summarize(profiler.events(), seconds, element_bytes)


def summarize(events: Iterable[Any], seconds: float, element_bytes: int) -> StepProfile:
    """Return the profile of these events of torch's profiler; what no event covers is Python."""
    groups = dict.fromkeys((*GROUPS, PYTHON), 0.0)
    products = []
    for event in events:
        if event.name.startswith(("USDT", "PROFILER", "##", "ProfilerStep")):
            continue
        group, own = find_group(event.name), event.self_cpu_time_total / 1e6
        groups[group] += own
        if group == PRODUCTS:
            sizes = [shape for shape in event.input_shapes if len(shape) > 1]
            # Compiled code also passes the result.
            sizes = (
                sizes[:2] if event.name in ("aten::mm", "aten::addmm", "aten::bmm") else sizes[-2:]
            )
            products.append(Product(round(own, 6), *measure(sizes, element_bytes)))
    groups[PYTHON] = max(0.0, seconds - sum(groups.values()))
    return StepProfile(groups, products)


def find_group(name: str) -> str:
    """Return the group of an operation or compiled kernel."""
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name))


def measure(sizes: Sequence[Sequence[int]], element_bytes: int) -> tuple[int, int]:
    """Return the bytes of both operands and the result, and the operations, of a product."""
    if len(sizes) != 2:
        return 0, 0
    (*batch, rows, inner), (*_, columns) = sizes
    count = math.prod(batch)
    elements = rows * inner + inner * columns + rows * columns
    return count * elements * element_bytes, 2 * count * rows * inner * columns


def project(profile: StepProfile, times: float, gigabytes_per_second: float) -> float:
    """Return the seconds if products were so many times as fast, but not faster than memory."""
    least = gigabytes_per_second * 1e9
    return profile.outside + sum(
        max(each.seconds / times, each.bytes / least) for each in profile.products
    )
