"""What `bench` has measured, judged: the machine's peak, slow nodes, AMX or no AMX. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infra.instance_types import INSTANCE_TYPES

SLOW_BELOW = 0.9
"""Of the nodes' median: below, a node is called slow. Equal machines differ by a few percent."""


@dataclass(frozen=True)
class NodeSpeed:
    """One node's figures, its ranks together. ``peak_tflops`` is ``None`` where none is known."""

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
        """Between 0 and 1; ``None`` where no peak is known."""
        return self.gemm_tflops / self.peak_tflops if self.peak_tflops else None


@dataclass(frozen=True)
class SlowNode:
    """A node that makes every step of the whole job slow: ``share`` of the nodes' median."""

    node: str
    what: str
    share: float


@dataclass(frozen=True)
class BenchResult:
    """A finished `bench`. ``all_reduce`` holds bytes, seconds, bus_gb_s; empty on one node."""

    when: str
    cluster: str
    stack: str
    backend: str
    dtype: str
    dtype_reason: str
    matrix_size: int
    amx_expected: bool
    nodes: tuple[NodeSpeed, ...]
    all_reduce: tuple[Mapping[str, float], ...]
    torch: str

    @property
    def slow_nodes(self) -> tuple[SlowNode, ...]:
        return find_slow(self.nodes)

    @property
    def without_amx(self) -> tuple[NodeSpeed, ...]:
        return tuple(node for node in self.nodes if not node.amx)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json`` and for the file on the head: what was measured, and what follows."""
        nodes = [{**asdict(node), "peak_share": node.peak_share} for node in self.nodes]
        return {
            **asdict(self),
            "nodes": nodes,
            "all_reduce": list(self.all_reduce),
            "slow_nodes": [asdict(slow) for slow in self.slow_nodes],
            "amx": not self.without_amx,
        }


def read_speeds(content: Mapping[str, Any]) -> BenchResult:
    """What :meth:`BenchResult.as_dict` wrote. Raises ``KeyError`` or ``TypeError`` for anything else."""
    own = {key: content[key] for key in BenchResult.__dataclass_fields__}
    nodes = [
        NodeSpeed(**{key: node[key] for key in NodeSpeed.__dataclass_fields__})
        for node in content["nodes"]
    ]
    return BenchResult(**{**own, "nodes": tuple(nodes), "all_reduce": tuple(content["all_reduce"])})


def find_peak(instance_type: str, *, dtype: str, real: bool) -> float | None:
    """The peak in TFLOPS that figures in this arithmetic can be compared with, if there is one.

    Only AMX's own in bf16, and only of a whole machine: a virtual one shares its processor, and the
    embedded cloud's (``real`` is off) only bear the name.
    """
    machine = INSTANCE_TYPES.get(instance_type)
    if machine is None or not real or dtype != "bf16":
        return None
    return machine.peak_bf16_tflops


def find_slow(nodes: Sequence[NodeSpeed]) -> tuple[SlowNode, ...]:
    """The nodes that are clearly slower than the others at products or in memory."""
    kinds: dict[str, Callable[[NodeSpeed], float]] = {
        "matrix products": lambda node: node.gemm_tflops,
        "memory": lambda node: node.memory_gb_s,
    }
    found = []
    for what, read in kinds.items():
        # Of two, one is the measure of the other.
        usual = max if len(nodes) == 2 else statistics.median
        middle = usual(map(read, nodes))
        found += [
            SlowNode(node.name, what, read(node) / middle)
            for node in nodes
            if read(node) < SLOW_BELOW * middle
        ]
    return tuple(found)
