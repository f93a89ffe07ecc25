"""Results of `bench`: share of peak, slow nodes, and nodes without AMX. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from infra.instance_types import INSTANCE_TYPES

SLOW_BELOW = 0.9
"""A node below this share of the nodes' median is slow. Equal machines differ by a few percent."""


@dataclass(frozen=True)
class NodeSpeed:
    """One node's figures, summed over its ranks. ``peak_tflops`` is ``None`` if unknown."""

    name: str
    instance: str
    type: str
    hostname: str
    threads: int
    gemm_tflops: float
    peak_tflops: float | None
    memory_gb_s: float
    amx: bool
    onednn: str

    @property
    def peak_share(self) -> float | None:
        """Between 0 and 1; ``None`` if the peak is unknown."""
        return self.gemm_tflops / self.peak_tflops if self.peak_tflops else None


@dataclass(frozen=True)
class SlowNode:
    """A node that slows every step of a job; ``share`` is relative to the nodes' median."""

    node: str
    what: str
    share: float


@dataclass(frozen=True)
class AllReduce:
    """The speed of one size of message, the median of its repeats."""

    bytes: int
    seconds: float
    repeats: int
    bus_gb_s: float


@dataclass(frozen=True)
class BenchResult:
    """A finished `bench`; ``all_reduce`` is empty on one node."""

    when: str
    cluster: str
    stack: str
    backend: str
    dtype: str
    dtype_reason: str
    matrix_size: int
    amx_expected: bool
    nodes: Annotated[tuple[NodeSpeed, ...], Field(min_length=1)]
    all_reduce: tuple[AllReduce, ...]
    torch: str

    @property
    def slow_nodes(self) -> tuple[SlowNode, ...]:
        return find_slow(self.nodes)

    @property
    def without_amx(self) -> tuple[NodeSpeed, ...]:
        return tuple(node for node in self.nodes if not node.amx)

    def as_dict(self) -> dict[str, Any]:
        """Return measurements and conclusions, for ``--json`` and the file on the head."""
        nodes = [{**asdict(node), "peak_share": node.peak_share} for node in self.nodes]
        return {
            **asdict(self),
            "nodes": nodes,
            "slow_nodes": [asdict(slow) for slow in self.slow_nodes],
            "amx": not self.without_amx,
        }


def find_peak(instance_type: str, *, dtype: str, real: bool) -> float | None:
    """Return the peak in TFLOPS to compare figures in ``dtype`` with, if there is one.

    Only bf16 on AMX, and only on a whole machine, has one: a virtual machine shares its processor, and
    the embedded cloud's machines (not ``real``) have the name only.
    """
    machine = INSTANCE_TYPES.get(instance_type)
    if machine is None or not real or dtype != "bf16":
        return None
    return machine.peak_bf16_tflops


def find_slow(nodes: Sequence[NodeSpeed]) -> tuple[SlowNode, ...]:
    """Return the nodes that are clearly slower than the others at matrix products or memory."""
    kinds: dict[str, Callable[[NodeSpeed], float]] = {
        "matrix products": lambda node: node.gemm_tflops,
        "memory": lambda node: node.memory_gb_s,
    }
    found = []
    for what, read in kinds.items():
        # With two nodes, the faster one is the reference.
        usual = max if len(nodes) == 2 else statistics.median
        middle = usual(map(read, nodes))
        found += [
            SlowNode(node.name, what, read(node) / middle)
            for node in nodes
            if read(node) < SLOW_BELOW * middle
        ]
    return tuple(found)
