"""``python -m worker.bench OPTIONS``: one rank of a measurement. Exit code 1 is a failure."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch

from ..runtime.context import RankContext
from ..runtime.job import RunSettings, run_job
from ..runtime.process import leave
from . import BenchOptions, measure
from .onednn import ask_onednn


def main() -> int:
    """Measure as this rank. Returns its exit code."""
    options = BenchOptions(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    return run_job(measure_all, options, RunSettings(options.backend, output=None))


def measure_all(context: RankContext[BenchOptions]) -> dict[str, Any]:
    """Measure products and memory on all ranks at the same time, then the exchange between hosts."""
    mine, size = _measure_alone(context)
    return {
        "ranks": context.ranks.gather(mine),
        "matrix_size": size,
        "all_reduce": _measure_together(context),
        "torch": str(torch.__version__),
    }


def _measure_alone(context: RankContext[BenchOptions]) -> tuple[dict[str, Any], int]:
    """Return this rank's figures and the matrix size; all ranks run the same steps together."""
    options, ranks, events = context.options, context.ranks, context.events
    facts, dtype = context.hardware[ranks.rank].facts, context.precision.dtype
    events.emit("phase", name="which instructions oneDNN uses")
    said = ask_onednn()
    events.emit("phase", name="matrix products")
    # One size for all ranks, for comparable figures.
    size = min(ranks.gather(measure.choose_size(dtype)))
    ranks.gather(None)  # all ranks start together
    products = measure.repeat(measure.make_product(size, dtype), options.seconds)
    events.emit("phase", name="memory")
    neighbors = context.hosts.count(facts.hostname)
    cache = max(ranks.gather(measure.read_cache_bytes(os.sched_getaffinity(0))))
    array = measure.choose_array_bytes(cache, measure.read_available_bytes(), neighbors)
    memory = measure.measure_memory(array, options.seconds)
    mine = {
        "rank": ranks.rank,
        "hostname": facts.hostname,
        "threads": facts.threads,
        "gemm_tflops": measure.tflops(size, products.seconds),
        "gemm_repeats": products.repeats,
        "memory_gb_s": measure.triad_gb_per_second(array, memory.seconds),
        "memory_array_bytes": array,
        "amx": said.amx,  # what oneDNN ran, not what the CPU supports
        "onednn": said.verdict,
    }
    return mine, size


def _measure_together(context: RankContext[BenchOptions]) -> list[dict[str, Any]]:
    """Time all-reduce by size; returns nothing on one node, where no network is involved."""
    ranks = context.ranks
    if len(set(context.hosts)) < 2:
        return []
    context.events.emit("phase", name="all-reduce")
    found, sizes = [], measure.MESSAGE_SIZES
    for size in sizes:
        done = measure.measure_exchange(ranks, size, context.options.seconds / len(sizes))
        speed = measure.bus_gb_per_second(size, done.seconds, ranks.size)
        found.append({"bytes": size, **asdict(done), "bus_gb_s": speed})
    return found


if __name__ == "__main__":
    leave(main())
