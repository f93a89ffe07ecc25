"""Seconds from the start of a rank's process to its tenth step, without and with compiled code in the cache.

python -m benchmarks.first_steps [--batch-size 2] [--rounds 3]

The process does what a rank of `train squad` does: it imports torch, tokenizes questions, builds the model,
compiles the layers, and trains. Submission and launch are not included. ``parts`` are medians with compiled
code; ``again`` is the time of the same ten steps once more, which is not in the total. The default batch is
small because this measures the start: larger batches add only their own compute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.common import ROOT, finish
from benchmarks.squad_data import draw
from benchmarks.squad_sides import add_side_arguments, new_fast, read_features, side_arguments
from benchmarks.squad_speed import ALLOCATORS, environment
from jobs.worker.runtime.ranks import join

STEPS = 10
MOST_SECONDS = 12.0
PARTS = ("imports", "data", "model", "first_step", "other_steps", "again")


def be_rank(args: argparse.Namespace) -> None:
    """Train, and print when each part ended, in seconds."""
    ends = [time.perf_counter()]
    tokenizer, features = read_features(args)
    ends.append(time.perf_counter())
    with join("gloo", environ={}) as ranks:
        side = new_fast(args, tokenizer, ranks)
        ends.append(time.perf_counter())
        chosen = draw(features, STEPS, args.batch_size, seed=1)
        for some in (chosen[: args.batch_size], chosen[args.batch_size :], chosen):
            side.train(some)
            ends.append(time.perf_counter())
    print(json.dumps(ends), flush=True)


def seconds_by_part(args: argparse.Namespace, cache: str) -> dict[str, float]:
    """Start a rank that keeps compiled code in ``cache``, and return how long each part took."""
    command = [sys.executable, "-m", "benchmarks.first_steps", "--rank", *side_arguments(args)]
    own = {"TORCHINDUCTOR_CACHE_DIR": cache}
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment(args) | own,
        stdout=subprocess.PIPE,
        check=True,
    )
    # The clock is the same in all processes.
    ends: list[float] = json.loads(done.stdout.splitlines()[-1])
    begins = [begin, *ends]
    return {name: ends[n] - begins[n] for n, name in enumerate(PARTS)}


def total(parts: dict[str, float]) -> float:
    """Return the seconds to the tenth step."""
    return sum(parts.values()) - parts["again"]


def main() -> None:
    """Measure both in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_side_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="tcmalloc")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(dtype="bf16", batch_size=2, compile="on")
    args = parser.parse_args()
    if args.rank:
        be_rank(args)
        return
    cold, warm = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds_by_part(args, cache))
            warm.append(seconds_by_part(args, cache))
    seconds = {
        name: statistics.median(map(total, each)) for name, each in (("cold", cold), ("warm", warm))
    }
    parts = {name: statistics.median(each[name] for each in warm) for name in PARTS}
    missed = [f"{MOST_SECONDS:.0f} s"] if seconds["warm"] > MOST_SECONDS else []
    finish(
        missed,
        benchmark="first_steps",
        **{name: round(value, 1) for name, value in seconds.items()},
        parts={name: round(value, 2) for name, value in parts.items()},
        batch_size=args.batch_size,
        dtype=args.dtype,
    )


if __name__ == "__main__":
    main()
