"""Training steps without their matrix products: what is left when products become faster, as with AMX.

python -m benchmarks.overheads [--shape bert-large] [--dtype bf16] [--sides baseline fast] [--rounds 5]

For each side of benchmarks.squad_speed: milliseconds per feature by group of operations, from torch's
profiler, and a PROJECTION of the ratio to the baseline if products were 1, 4, 8, 12, or 16 times as fast, and
nothing else was. A product takes at least the time to move its operands and its result through memory once,
at STREAM's rate here and, in a second projection, at a metal machine's rate per core. Even that is uncertain:
caches hold some operands, but work between the products slows down as well where cores have less bandwidth.

Sides take turns, or, with --apart, run one after another: for models that do not fit in memory together.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence

from benchmarks.common import finish
from benchmarks.gemm import bare_tflops
from benchmarks.squad_data import find_encoder
from benchmarks.squad_sides import Round, add_side_arguments
from benchmarks.squad_speed import Played, add_round_arguments, play
from benchmarks.step_profile import project
from jobs.worker.bench.measure import (
    choose_array_bytes,
    measure_memory,
    read_available_bytes,
    read_cache_bytes,
)

TIMES = (1, 4, 8, 12, 16)
METAL_GB_S = 6.4
"""Highest memory bandwidth per core of a metal machine: 8 channels of DDR5-4800, 307 GB/s, for 48 cores."""
LIMIT = 6.0
"""The baseline's time outside products, divided by that of `fast`."""
PROJECTED = 5.0
"""The ratio to be reached with products 12 times as fast."""


def milliseconds(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the medians per feature by group."""
    found: dict[str, list[float]] = {}
    for each in rounds:
        assert each.profile is not None
        for group, seconds in each.profile.groups.items():
            found.setdefault(group, []).append(1000 * seconds / each.features)
    return {group: round(statistics.median(values), 3) for group, values in found.items()}


def per_feature(each: Round, times: float, rate: float) -> float:
    """Return the projected seconds per feature of a round."""
    assert each.profile is not None
    return project(each.profile, times, rate) / each.features


def outside(each: Round) -> float:
    """Return the seconds per feature outside products."""
    assert each.profile is not None
    return each.profile.outside / each.features


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    add_side_arguments(parser)
    add_round_arguments(parser, ["baseline", "fast"])
    parser.set_defaults(dtype="bf16", batch_size=16, profile=True)
    args = parser.parse_args()
    args.encoder = find_encoder(args.encoder)
    os.environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    played = play(args)
    cache, available = read_cache_bytes(range(args.threads)), read_available_bytes()
    rate = measure_memory(choose_array_bytes(cache, available, 1), 3.0).gb_per_second
    report(args, played, rate)


def report(args: argparse.Namespace, played: dict[str, Played], rate: float) -> None:
    """Print the figures, and end."""
    rounds = {side: each.rounds for side, each in played.items()}
    figures: dict[str, object] = {}
    missed = []
    for side, own in rounds.items():
        if side == "baseline" or "baseline" not in rounds:
            continue
        pairs = list(zip(rounds["baseline"], own, strict=True))
        rest = statistics.median(outside(a) / outside(b) for a, b in pairs)
        here, metal = (
            {f"{times} x": _projected(pairs, times, each) for times in TIMES}
            for each in (rate, min(rate, METAL_GB_S * args.threads))
        )
        figures[side] = {
            "ratio_outside_products": round(rest, 2),
            "projected_ratio": here,
            "projected_ratio_on_metal": metal,
        }
        if side == "fast":
            missed += (
                [] if rest >= LIMIT else [f"1/{LIMIT} of the baseline's time outside products"]
            )
            missed += [] if here["12 x"] >= PROJECTED else [f"{PROJECTED} x projected at 12 x"]
    finish(
        missed,
        benchmark="overheads",
        milliseconds_per_feature={side: milliseconds(own) for side, own in rounds.items()},
        to_baseline=figures,
        memory_gb_s=round(rate, 1),
        gemm_tflops=round(bare_tflops(args.dtype, args.threads), 4),
        **{name: getattr(args, name) for name in ("shape", "batch_size", "dtype", "threads")},
        steps=args.steps,
        rounds=args.rounds,
    )


def _projected(pairs: Sequence[tuple[Round, Round]], times: float, rate: float) -> float:
    return round(
        statistics.median(
            per_feature(a, times, rate) / per_feature(b, times, rate) for a, b in pairs
        ),
        2,
    )


if __name__ == "__main__":
    main()
