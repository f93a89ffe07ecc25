"""One measurement from its options to its figures: the phases, in their order."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from ..runtime.events import Events
from ..runtime.pinning import take_place
from ..runtime.precision import Precision, choose_precision, read_cpu_flags
from ..runtime.ranks import Ranks, join
from .exchange import SIZES, bus_gb_per_second, measure_exchange
from .measure import (
    choose_array_bytes,
    choose_size,
    measure_memory,
    measure_products,
    read_available_bytes,
    read_cache_bytes,
    tflops,
)
from .onednn import ask_onednn
from .options import BenchOptions


@dataclass(frozen=True)
class RankSpeed:
    """One rank's figures. ``amx`` and ``onednn`` are oneDNN's own word."""

    rank: int
    hostname: str
    threads: int
    gemm_tflops: float
    gemm_repeats: int
    memory_gb_s: float
    memory_array_bytes: int
    amx: bool
    onednn: str


def run(options: BenchOptions, events: Events) -> None:
    """Measure as this rank; raises :class:`jobs.worker.runtime.errors.SquadError`."""
    _, place = take_place(os.environ)
    with join(options.backend) as ranks:
        flags = dict(ranks.gather((socket.gethostname(), read_cpu_flags())))
        precision = choose_precision("auto", flags)
        events.note(
            f"{ranks.size} ranks over {ranks.backend}; {precision.dtype}: {precision.reason}"
        )
        mine, size = _measure_alone(options, ranks, precision, events, place.threads)
        speeds: list[RankSpeed] = ranks.gather(mine)
        exchanges = _measure_together(options, ranks, len(flags), events)
        events.emit(
            "result",
            backend=ranks.backend,
            dtype=precision.dtype,
            dtype_reason=precision.reason,
            matrix_size=size,
            ranks=[asdict(speed) for speed in speeds],
            all_reduce=exchanges,
            torch=version("torch"),
        )


def _measure_alone(
    options: BenchOptions, ranks: Ranks, precision: Precision, events: Events, threads: int
) -> tuple[RankSpeed, int]:
    """This rank's own figures, and the matrices' size; all ranks measure the same at the same time."""
    events.emit("phase", name="which instructions oneDNN uses")
    said = ask_onednn()
    events.emit("phase", name="matrix products")
    # One size for all, or their figures could not be compared.
    size = min(ranks.gather(choose_size(precision.dtype)))
    ranks.gather(None)  # here all ranks meet
    products = measure_products(size, precision.dtype, options.seconds)
    events.emit("phase", name="memory")
    hosts = ranks.gather(socket.gethostname())
    neighbours = hosts.count(socket.gethostname())
    cache = max(ranks.gather(read_cache_bytes(os.sched_getaffinity(0))))
    memory = measure_memory(
        choose_array_bytes(cache, read_available_bytes(), neighbours), options.seconds
    )
    mine = RankSpeed(
        rank=ranks.rank,
        hostname=socket.gethostname(),
        threads=threads,
        gemm_tflops=tflops(size, products.seconds),
        gemm_repeats=products.repeats,
        memory_gb_s=memory.gb_per_second,
        memory_array_bytes=memory.array_bytes,
        amx=said.amx,
        onednn=said.verdict,
    )
    return mine, size


def _measure_together(
    options: BenchOptions, ranks: Ranks, hosts: int, events: Events
) -> list[dict[str, Any]]:
    """All-reduce by size; nothing on one node, where no network is between the ranks."""
    if hosts < 2:
        return []
    events.emit("phase", name="all-reduce")
    found = []
    for size in SIZES:
        done = measure_exchange(ranks, size, options.seconds / len(SIZES))
        speed = bus_gb_per_second(size, done.seconds, ranks.size)
        found.append({**asdict(done), "bus_gb_s": speed})
    return found
