"""Seconds from the start of a rank's process to its tenth step, without and with compiled code in the cache.

python -m benchmarks.first_steps [--batch-size 8] [--rounds 3]

The process is that of `benchmarks.squad_speed`'s fast side, one rank: it imports torch, builds the model,
tokenizes the questions, compiles the layers, and trains. Submission and launch are not included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.common import ROOT, finish
from benchmarks.squad_sides import add_side_arguments, side_arguments

STEPS = 10
MOST_SECONDS = 12.0


def seconds_to_steps(arguments: list[str], cache: str) -> float:
    """Start a rank that keeps compiled code in ``cache``, and return the seconds until it took 10 steps."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.squad_sides", "--side=fast", *arguments],
        cwd=ROOT,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write(f"{STEPS} 1\n")
        rank.stdin.flush()
        for line in rank.stdout:
            if line.startswith('{"features"'):
                seconds = time.perf_counter() - begin
                rank.stdin.close()
                return seconds
    raise SystemExit("the rank ended before its tenth step")


def main() -> None:
    """Measure both in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_side_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(dtype="bf16", batch_size=8)
    args = parser.parse_args()
    arguments = side_arguments(args)
    cold, warm = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds_to_steps(arguments, cache))
            warm.append(seconds_to_steps(arguments, cache))
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
