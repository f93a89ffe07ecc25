"""A model of the step time on several nodes: computing, and the exchange of gradients. Pure.

A node computes for ``fixed_s`` plus ``sample_s`` per sample. The gradients then travel around a ring of
R members: each link carries 2 (R - 1) / R times their bytes, in 2 (R - 1) messages per bucket. The members
are the nodes if ranks sum by node, as over gloo: each rank then has a flow for its part of the bytes.
Otherwise they are the ranks; those of one node are neighbors, so that one flow leaves each node. The part of
the exchange that runs during the backward pass makes the fitted network seem faster.

    step = compute + exchange

Not modeled: slow ranks, waiting for input, other traffic, and small batches that are less efficient
than ``fixed_s`` accounts for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

LATENCY_S = 50e-6
"""Of one message between two nodes over TCP: an assumption, small compared with the rest."""
BUCKET_BYTES = 25 << 20
"""DDP's: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"""
_SCAN = 400


@dataclass(frozen=True)
class StepTiming:
    """A measurement: samples per step and node, and seconds per step."""

    nodes: int
    node_batch: float
    step_s: float


@dataclass(frozen=True)
class StepModel:
    """Times in seconds; ``bytes_per_second`` is the speed of one flow between nodes."""

    sample_s: float
    gradient_bytes: float
    bytes_per_second: float
    fixed_s: float = 0.0
    ranks_per_node: int = 1
    by_node: bool = False
    latency_s: float = LATENCY_S

    def compute_s(self, node_batch: float) -> float:
        return self.fixed_s + self.sample_s * node_batch

    def exchange_s(self, nodes: int) -> float:
        """Return 0 for one node: the exchange between its ranks is part of its computing."""
        if nodes == 1:
            return 0.0
        members, flows = (
            (nodes, self.ranks_per_node) if self.by_node else (nodes * self.ranks_per_node, 1)
        )
        rounds = 2 * (members - 1)
        buckets = math.ceil(self.gradient_bytes / BUCKET_BYTES)
        wire = rounds / members * self.gradient_bytes / flows / self.bytes_per_second
        return wire + rounds * buckets * self.latency_s

    def step_s(self, nodes: int, node_batch: float) -> float:
        return self.compute_s(node_batch) + self.exchange_s(nodes)

    def samples_per_second(self, nodes: int, node_batch: float) -> float:
        """Of all nodes together."""
        return nodes * node_batch / self.step_s(nodes, node_batch)


@dataclass(frozen=True)
class StepModelFit:
    """A fitted model, with its relative error for each measurement.

    ``parameters`` were fitted; with as few measurements as parameters, the errors prove nothing.
    """

    model: StepModel
    parameters: tuple[str, ...]
    errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors))

    @property
    def is_tested(self) -> bool:
        """Return whether there are more measurements than parameters."""
        return len(self.errors) > len(self.parameters)


def fit_step_model(
    points: Sequence[StepTiming],
    gradient_bytes: float,
    ranks_per_node: int = 1,
    *,
    by_node: bool = False,
) -> StepModelFit:
    """Fit the model to the measurements by least squares of the relative errors.

    Raises ``ValueError`` without a measurement.
    """
    if not points:
        raise ValueError("nothing was measured")
    base = StepModel(0.0, gradient_bytes, math.inf, ranks_per_node=ranks_per_node, by_node=by_node)
    several = len({point.node_batch for point in points}) > 1 and len(points) > 2
    compute = ("sample_s", "fixed_s") if several else ("sample_s",)
    if all(point.nodes == 1 for point in points):
        return _judge(_with_compute(base, points, several), points, compute)

    def vary(value: float) -> StepModel:
        return _with_compute(replace(base, bytes_per_second=10**value), points, several)

    def loss(value: float) -> float:
        model = vary(value)
        return sum(_error(model, point) ** 2 for point in points)

    # Speeds from 1 KB/s to 10 TB/s as powers of ten.
    return _judge(vary(_scan(loss, 3.0, 13.0)), points, (*compute, "bytes_per_second"))


def _scan(loss: Callable[[float], float], low: float, high: float) -> float:
    """Minimize a function of one number on a grid, then on finer grids around the minimum."""
    best = low
    for _ in range(4):
        grid = [low + (high - low) * i / _SCAN for i in range(_SCAN + 1)]
        best = min(grid, key=loss)
        width = (high - low) / _SCAN
        low, high = max(grid[0], best - width), min(grid[-1], best + width)
    return best


def _with_compute(model: StepModel, points: Sequence[StepTiming], several: bool) -> StepModel:
    """Return the model with its computing fitted to what the exchange leaves of the measurements."""
    rows = [
        (p.node_batch / p.step_s, 1 / p.step_s, 1 - model.exchange_s(p.nodes) / p.step_s)
        for p in points
    ]
    xx = sum(x * x for x, _, _ in rows)
    xc = sum(x * c for x, _, c in rows)
    alone = replace(model, sample_s=max(xc / xx, 0.0), fixed_s=0.0)
    if not several:
        return alone
    xo, oo = sum(x * o for x, o, _ in rows), sum(o * o for _, o, _ in rows)
    oc, det = sum(o * c for _, o, c in rows), xx * oo - xo * xo
    sample, fixed = (xc * oo - oc * xo) / det, (xx * oc - xo * xc) / det
    return replace(model, sample_s=sample, fixed_s=fixed) if min(sample, fixed) >= 0 else alone


def _error(model: StepModel, point: StepTiming) -> float:
    return model.step_s(point.nodes, point.node_batch) / point.step_s - 1


def _judge(
    model: StepModel, points: Sequence[StepTiming], parameters: tuple[str, ...]
) -> StepModelFit:
    return StepModelFit(model, parameters, tuple(_error(model, point) for point in points))


SQUAD_FEATURES = 88_500
"""Approximate features of SQuAD v1.1's training set at 384 tokens and stride 128."""
EPOCH_S: Mapping[int, float] = {1: 26 * 60.0, 4: 7 * 60.0 + 30}
"""Seconds by number of nodes."""
MACHINE = "r7iz.metal-16xl"


def published_speedups() -> dict[int, float]:
    """Return the speedup over one node, by number of nodes."""
    return {nodes: EPOCH_S[1] / seconds for nodes, seconds in EPOCH_S.items()}
