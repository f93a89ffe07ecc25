"""Peak resident memory of a rank, compared with run_qa.py's settings and the same batch.

python -m benchmarks.memory [--shape bert-large] [--batch-size 32] [--steps 2]

Each side is a process of its own (benchmarks.squad_sides) with the system's own allocator. The features
hold the longest ones there are, as the peak is theirs; both sides get the same.
"""

from __future__ import annotations

import argparse

from benchmarks.baseline import TRAINER
from benchmarks.common import finish
from benchmarks.squad_data import find_encoder
from benchmarks.squad_sides import LONGEST, add_side_arguments
from benchmarks.squad_speed import playing


def main() -> None:
    """Run both sides in turn; print both peaks and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_side_arguments(parser)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    args.encoder, args.allocator = find_encoder(args.encoder), "plain"
    peaks = {}
    for side in ("baseline", "fast"):
        with playing(side, args) as player:
            peaks[side] = player.play(args.steps, seed=LONGEST).memory_gb
        print(f"{side}: {peaks[side]:.2f} GiB", flush=True)
    ratio = peaks["fast"] / peaks["baseline"]
    finish(
        [] if ratio <= 1 else ["no more than the baseline"],
        benchmark="memory",
        limit_ratio=1.0,
        ratio=round(ratio, 3),
        peak_gib=peaks,
        baseline=TRAINER,
        **{
            name: getattr(args, name)
            for name in ("shape", "batch_size", "dtype", "threads", "steps", "compile")
        },
    )


if __name__ == "__main__":
    main()
