"""The measurements of a single rank: matrix products and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch

SIZES = (1024, 2048, 4096, 8192)
"""Rows and columns of the matrices; :func:`choose_size` chooses one."""
LONG_ENOUGH_S = 0.02
WARM_UPS = 2
FEWEST = 5
"""Least number of products (or triads) for a median, however long one takes."""
_CACHES = Path("/sys/devices/system/cpu")
_MEMORY = Path("/proc/meminfo")
_SMALLEST_ARRAY = 64 << 20


@dataclass(frozen=True)
class Timing:
    """Repetitions of the same work: their median in seconds, and their number."""

    seconds: float
    repeats: int


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
    kind = _torch_dtype(dtype)
    left, right = torch.randn(2, size, size).to(kind)
    out = torch.empty(size, size, dtype=kind)
    return lambda: torch.mm(left, right, out=out)


def choose_size(dtype: str, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the smallest size whose product takes long enough to be timed well, else the largest."""
    for size in SIZES:
        work = make_product(size, dtype)
        work()
        start = clock()
        work()
        if clock() - start >= LONG_ENOUGH_S:
            return size
    return SIZES[-1]


def measure_products(size: int, dtype: str, seconds: float) -> Timing:
    """Time products of that size."""
    return repeat(make_product(size, dtype), seconds)


def _torch_dtype(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype == "bf16" else torch.float32


@dataclass(frozen=True)
class Triad:
    """``a = b + 3 c`` over fp32 arrays of ``array_bytes`` each; GB/s as STREAM counts them."""

    timing: Timing
    array_bytes: int

    @property
    def gb_per_second(self) -> float:
        """Two arrays read and one written. Reads of the third before it is written do not count, as
        in https://www.cs.virginia.edu/stream/ref.html ("counting")."""
        return 3 * self.array_bytes / self.timing.seconds / 1e9


def measure_memory(array_bytes: int, seconds: float) -> Triad:
    """Time the triad. The computing threads write the arrays first, so that their memory is near."""
    elements = array_bytes // 4
    out, left, right = (torch.full((elements,), value) for value in (0.0, 1.0, 2.0))
    timing = repeat(lambda: torch.add(left, right, alpha=3.0, out=out), seconds)
    return Triad(timing, elements * 4)


def choose_array_bytes(cache: int, available: int, ranks: int) -> int:
    """Return an array's bytes: four times the caches (STREAM's rule), at most 1/16 of a rank's memory."""
    return max(_SMALLEST_ARRAY, min(4 * cache, available // ranks // 16))


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
