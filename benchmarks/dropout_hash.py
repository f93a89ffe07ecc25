"""Statistical tests of the dropout mask: share of kept elements, runs, lags, and pairs of masks.

python -m benchmarks.dropout_hash [--seeds 64] [--size 22] [--dropout 0.1]

Each figure is a z-score, which is within 3 in 99.7 % of cases if the mask is random; the limits allow for the
number of tests. Pairs are masks of different seeds, as layers, steps, and ranks have: the largest correlation
over all shifts of one mask against the other, which shows whether they are parts of one sequence.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
import torch

from benchmarks.common import finish
from jobs.worker.fast.dropout import GOLDEN, HashDropout

LAGS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--size", type=int, default=22, help="log2 of the elements of a mask")
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"kept": [], "runs": [], "lags": [], "pairs": []}
    tests = {"kept": 1, "runs": 1, "lags": LAGS, "pairs": 2 ** (args.size + 1)}
    before = None
    for mask in masks(args.seeds, 2**args.size, args.dropout):
        found["kept"].append(mask.sum() / math.sqrt(len(mask)))
        found["runs"].append(count_runs(mask, args.dropout))
        found["lags"].append(float(np.abs(correlate(mask, mask)[1 : LAGS + 1]).max()))
        if before is not None:
            found["pairs"].append(float(np.abs(correlate(before, mask)).max()))
        before = mask
    missed, figures = [], {}
    for name, scores in found.items():
        worst = max(map(abs, scores))
        limit = NormalDist().inv_cdf(1 - 0.0005 / (tests[name] * len(scores)))
        figures[name] = {"worst_z": round(worst, 2), "limit": round(limit, 2)}
        missed += [f"{name}: {worst:.1f}"] if worst > limit else []
    finish(missed, benchmark="dropout_hash", **figures, **vars(args))


def masks(seeds: int, elements: int, p: float) -> Iterator[np.ndarray]:
    """Return masks as numbers with mean 0 and variance 1, of random and of neighboring seeds."""
    layer, generator = HashDropout(p), torch.Generator().manual_seed(1)
    draw = {"size": (), "generator": generator, "dtype": torch.int32}
    for number in range(seeds):
        # Two of four follow their predecessors: the next call of a shared layer, and the next number.
        if number % 4 in (0, 3):
            layer.seed = torch.randint(-(2**31), 2**31 - 1, **draw)  # type: ignore[call-overload]
        elif number % 4 == 2:
            layer.seed = layer.seed - GOLDEN + 1
        kept = layer(torch.ones(elements)) != 0
        yield (kept.numpy().astype(np.float64) - (1 - p)) / math.sqrt(p * (1 - p))


def count_runs(mask: np.ndarray, p: float) -> float:
    """Return the z-score of the number of changes between neighbors."""
    changes = np.count_nonzero(mask[1:] != mask[:-1])
    count, share = len(mask) - 1, 2 * p * (1 - p)
    # Neighboring changes depend on each other unless p is 1/2.
    variance = count * (share * (1 - share) + 2 * (p * (1 - p) - share**2))
    return float((changes - count * share) / math.sqrt(variance))


def correlate(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the z-scores of the correlations at all shifts."""
    size = 2 * len(one)
    product = np.fft.rfft(one, size) * np.conj(np.fft.rfft(other, size))
    sums = np.fft.irfft(product, size)
    # At a shift of n, all but n elements overlap.
    overlap = np.maximum(len(one) - np.minimum(np.arange(size), size - np.arange(size)), 1)
    result: np.ndarray = sums / np.sqrt(overlap)
    result[overlap < 10_000] = 0
    return result


if __name__ == "__main__":
    main()
