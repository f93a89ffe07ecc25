"""The measurements: matrix products and memory of a single rank, and all-reduce among all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..runtime.ranks import Ranks
from ..runtime.steps import how_many

SIZES = (1024, 2048, 4096, 8192)
"""Matrix sizes; :func:`choose_size` chooses one."""
LONG_ENOUGH_S = 0.02
WARM_UPS = 2
FEWEST = 5
"""Minimum number of products, triads, or messages for a median."""
_CACHES = Path("/sys/devices/system/cpu")
_MEMORY = Path("/proc/meminfo")
_SMALLEST_ARRAY = 64 << 20
MESSAGE_SIZES = tuple(kib << 10 for kib in (4, 64, 1024, 16 * 1024, 64 * 1024))
"""Bytes per message. DDP's buckets have 25 MiB; small messages show the latency."""
MESSAGE_WARM_UPS, MOST_MESSAGES = 3, 500


@dataclass(frozen=True)
class Timing:
    """Repetitions of the same work: their median in seconds, and their number."""

    seconds: float
    repeats: int


def bus_gb_per_second(size: int, seconds: float, ranks: int) -> float:
    """Return the bandwidth of each link, in GB/s, for any number of ranks.

    In the best algorithm, every byte leaves and reaches a rank 2 (n - 1) / n times; source:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def measure_exchange(ranks: Ranks, size: int, seconds: float) -> Timing:
    """Time all-reduce of fp32 numbers: the slowest rank's median. All ranks must call it."""
    message = torch.zeros(size // 4)

    def once() -> float:
        start = time.perf_counter()
        dist.all_reduce(message)
        return time.perf_counter() - start

    trials = [once() for _ in range(MESSAGE_WARM_UPS)]
    # All ranks must agree on the number, or some would wait forever.
    repeats = ranks.share(how_many(seconds, trials[-1], FEWEST, MOST_MESSAGES))
    dist.barrier(group=ranks.control)
    taken = [once() for _ in range(repeats)]
    return Timing(max(ranks.gather(statistics.median(taken))), repeats)


def repeat(
    work: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Time work repeatedly for about ``seconds``, after a warm-up."""
    for _ in range(WARM_UPS):
        work()
    taken: list[float] = []
    begin = clock()
    while len(taken) < FEWEST or clock() - begin < seconds:
        start = clock()
        work()
        taken.append(clock() - start)
    return Timing(statistics.median(taken), len(taken))


def tflops(size: int, seconds: float) -> float:
    """Return the TFLOPS of a square product: a multiplication and an addition for each of size^3 pairs."""
    return 2 * size**3 / seconds / 1e12


def make_product(size: int, dtype: str) -> Callable[[], object]:
    """Return a function that multiplies two random square matrices in bf16 or fp32."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    left, right = torch.randn(2, size, size).to(kind)
    out = torch.empty(size, size, dtype=kind)
    return lambda: torch.mm(left, right, out=out)


def choose_size(dtype: str) -> int:
    """Return the smallest size whose product takes long enough to be timed well, else the largest."""
    for size in SIZES:
        work = make_product(size, dtype)
        work()
        start = time.perf_counter()
        work()
        if time.perf_counter() - start >= LONG_ENOUGH_S:
            return size
    return SIZES[-1]


def triad_gb_per_second(array_bytes: int, seconds: float) -> float:
    """Return the GB/s of a triad: two arrays read and one written. Reads of the third before it is written do
    not count, as in https://www.cs.virginia.edu/stream/ref.html ("counting")."""
    return 3 * array_bytes / seconds / 1e9


def measure_memory(array_bytes: int, seconds: float) -> Timing:
    """Time the triad ``a = b + 3 c`` over fp32 arrays. The computing threads write them first, for local
    memory."""
    out, left, right = (torch.full((array_bytes // 4,), value) for value in (0.0, 1.0, 2.0))
    return repeat(lambda: torch.add(left, right, alpha=3.0, out=out), seconds)


def choose_array_bytes(cache: int, available: int, ranks: int) -> int:
    """Return an array's bytes: four times the caches (STREAM's rule), at most 1/16 of a rank's memory."""
    return max(_SMALLEST_ARRAY, min(4 * cache, available // ranks // 16) // 4 * 4)


def read_cache_bytes(cpus: Collection[int], root: Path = _CACHES) -> int:
    """Return the bytes of all last-level caches of these CPUs; 0 if the kernel does not list them."""
    found: dict[str, int] = {}
    for cpu in cpus:
        levels = sorted((root / f"cpu{cpu}" / "cache").glob("index[0-9]*"))
        if levels:
            shared = (levels[-1] / "shared_cpu_list").read_text().strip()
            found[shared] = int((levels[-1] / "size").read_text().strip().removesuffix("K")) << 10
    return sum(found.values())


def read_available_bytes(path: Path = _MEMORY) -> int:
    """Return the memory that is available to programs."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next(int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:")
