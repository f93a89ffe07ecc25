"""Speed of the exchange of gradients among all ranks: all-reduce by size."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..runtime.ranks import Ranks

SIZES = tuple(kib << 10 for kib in (4, 64, 1024, 16 * 1024, 64 * 1024))
"""Bytes per message. DDP's buckets have 25 MiB; small messages show the latency."""
_WARM_UPS = 3
_FEWEST, _MOST = 5, 500


@dataclass(frozen=True)
class Exchange:
    """All-reduce of ``bytes`` in ``seconds``: the slowest rank's median."""

    bytes: int
    seconds: float
    repeats: int


def bus_gb_per_second(size: int, seconds: float, ranks: int) -> float:
    """Return the bandwidth of each link, in GB/s, whatever the number of ranks.

    In the best algorithm, every byte leaves and reaches a rank 2 (n - 1) / n times; source:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def measure_exchange(ranks: Ranks, size: int, seconds: float) -> Exchange:
    """Time all-reduce of fp32 numbers over the job's backend; all ranks must call it."""
    message = torch.zeros(size // 4)

    def once() -> float:
        start = time.perf_counter()
        dist.all_reduce(message)
        return time.perf_counter() - start

    trials = [once() for _ in range(_WARM_UPS)]
    # The same number on all ranks, or some would wait forever.
    repeats = ranks.share(choose_repeats(seconds, trials[-1]))
    dist.barrier(group=ranks.control)
    taken = [once() for _ in range(repeats)]
    return Exchange(size, max(ranks.gather(statistics.median(taken))), repeats)


def choose_repeats(seconds: float, one: float) -> int:
    """Return how many fit into the time, within bounds."""
    return max(_FEWEST, min(_MOST, int(seconds / max(one, 1e-6))))
