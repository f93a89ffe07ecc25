"""Seconds from the start of a rank's process to its tenth step, without and with compiled code in the cache.

python -m benchmarks.first_steps [--batch-size 8] [--rounds 3]

The process is that of `benchmarks.squad_speed`'s fast side, one rank: it imports torch, builds the model,
tokenizes the questions, compiles the layers, and trains. Submission and launch are not included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

from benchmarks.common import finish
from benchmarks.squad_sides import add_side_arguments
from benchmarks.squad_speed import playing

STEPS = 10
MOST_SECONDS = 12.0


def seconds_to_steps(args: argparse.Namespace, cache: str) -> float:
    """Start a rank that keeps compiled code in ``cache``, and return the seconds until it took 10 steps."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    begin = time.perf_counter()
    with playing("fast", args) as rank:
        rank.play(STEPS, seed=1)
        return time.perf_counter() - begin


def main() -> None:
    """Measure both in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_side_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(dtype="bf16", batch_size=8, allocator="tcmalloc")
    args = parser.parse_args()
    cold, warm = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds_to_steps(args, cache))
            warm.append(seconds_to_steps(args, cache))
    seconds = {"cold": statistics.median(cold), "warm": statistics.median(warm)}
    missed = [f"{MOST_SECONDS:.0f} s"] if seconds["warm"] > MOST_SECONDS else []
    finish(
        missed,
        benchmark="first_steps",
        **{name: round(value, 1) for name, value in seconds.items()},
        batch_size=args.batch_size,
        dtype=args.dtype,
    )


if __name__ == "__main__":
    main()
