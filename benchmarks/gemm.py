"""Accuracy of `bench`: its TFLOPS compared with those of a bare torch loop.

python -m benchmarks.gemm [--rounds 7] [--seconds 2]

Both run in turn, as separate processes with the same number of threads, so that other work on the machine
affects both. The bare loop is independent of `bench`: it counts products into one output matrix.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import ROOT, finish
from jobs.worker.runtime.events import parse_event
from jobs.worker.runtime.precision import read_cpu_flags

BAR = 0.15
_DEADLINE_S = 600
_BARE = """
import sys, time
import torch
size, dtype, limit = int(sys.argv[1]), getattr(torch, sys.argv[2]), float(sys.argv[3])
a = torch.randn(size, size).to(dtype)
b = torch.randn(size, size).to(dtype)
out = torch.empty(size, size, dtype=dtype)  # a new output for each product would cost page faults
torch.mm(a, b, out=out)
count, begin = 0, time.perf_counter()
while time.perf_counter() - begin < limit:
    torch.mm(a, b, out=out)
    count += 1
print(2 * size ** 3 * count / (time.perf_counter() - begin) / 1e12)
"""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> None:
    """Run both in turn; print their medians, the median of their ratios, and oneDNN's verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    ours: list[float] = []
    bare: list[float] = []
    for number in range(1, args.rounds + 1):
        result = _measure(args.seconds, args.threads)
        (rank,) = result["ranks"]
        ours.append(rank["gemm_tflops"])
        bare.append(_loop(result["matrix_size"], result["dtype"], args.seconds, args.threads))
        print(f"{number}: bench {ours[-1]:.4f}, bare {bare[-1]:.4f} TFLOPS", flush=True)
    # Of neighbors in time: with other work, a machine's speed changes from minute to minute.
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, bare, strict=True))
    missed = [] if abs(ratio - 1) <= BAR else [f"within {BAR:.0%} of the bare loop"]
    if rank["amx"] and "amx_bf16" not in read_cpu_flags():
        missed.append("no AMX on a processor without it")
    finish(
        missed,
        benchmark="gemm",
        limit_ratio=[1 - BAR, 1 + BAR],
        ratio=round(ratio, 4),
        bench_tflops=round(statistics.median(ours), 5),
        bare_tflops=round(statistics.median(bare), 5),
        rounds=args.rounds,
        dtype=result["dtype"],
        matrix_size=result["matrix_size"],
        threads=rank["threads"],
        memory_gb_s=round(rank["memory_gb_s"], 2),
        onednn=rank["onednn"],
        torch=result["torch"],
    )


def _measure(seconds: float, threads: int) -> dict[str, Any]:
    """Run on this machine what `bench` runs on a node."""
    text = _run(
        [sys.executable, "-m", "jobs.worker.bench", json.dumps({"seconds": seconds})], threads
    )
    events = [event for event in map(parse_event, text.splitlines()) if event]
    return next(event for event in events if event["event"] == "result")


def _loop(size: int, dtype: str, seconds: float, threads: int) -> float:
    argv = [sys.executable, "-c", _BARE, str(size), _DTYPES[dtype], str(seconds)]
    return float(_run(argv, threads))


def bare_tflops(dtype: str, threads: int, size: int = 2048, seconds: float = 3.0) -> float:
    """Return the TFLOPS of a bare product of two square matrices, the best of three times."""
    return max(_loop(size, dtype, seconds / 3, threads) for _ in range(3))


def _run(argv: Sequence[str], threads: int) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PMI_")}
    done = subprocess.run(
        argv,
        env={**environ, "OMP_NUM_THREADS": str(threads)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_DEADLINE_S,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    main()
