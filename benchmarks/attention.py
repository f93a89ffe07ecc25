"""Attention by batched products beside torch's fused attention, compiled, forward and backward, by length."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import finish
from jobs.worker.fast.attention import LONGEST, ProductAttention

HEADS, SIZE, TOKENS = 12, 64, 4096
"""DistilBERT's heads, and the tokens of a batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 192, 256, 384, 512])
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    found = {}
    for length in args.lengths:
        seconds = measure(length, dtype, args.rounds)
        found[length] = {
            **{name: round(1000 * statistics.median(each), 1) for name, each in seconds.items()},
            "ratio": round(
                statistics.median(
                    fused / own
                    for own, fused in zip(seconds["products"], seconds["fused"], strict=True)
                ),
                2,
            ),
        }
        print(length, found[length], flush=True)
    missed = [
        f"the slower one is used at {length}"
        for length, each in found.items()
        if (each["ratio"] > 1) != (length <= LONGEST) and not LONGEST / 2 < length <= LONGEST
    ]
    finish(missed, milliseconds=found, dtype=args.dtype, threads=args.threads)


def measure(length: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of both ways, which take turns."""
    batch = max(1, TOKENS // length)
    inputs = [
        torch.randn(batch, HEADS, length, SIZE, dtype=dtype).requires_grad_() for _ in range(3)
    ]
    mask = torch.zeros(batch, 1, length, length, dtype=dtype)
    gradient = torch.randn(batch, HEADS, length, SIZE, dtype=dtype)
    ways: dict[str, Callable[..., Any]] = {
        "products": torch.compile(products, dynamic=True),
        "fused": torch.compile(fused, dynamic=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, way in ways.items():
            for each in inputs:
                each.grad = None
            begin = time.perf_counter()
            way(*inputs, mask).backward(gradient)
            seconds[name].append(time.perf_counter() - begin)
    return {name: each[2:] for name, each in seconds.items()}


def products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
    return ProductAttention.apply(query, key, value, mask, SIZE**-0.5, None, 0.0)  # type: ignore[no-untyped-call]


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, mask)


if __name__ == "__main__":
    main()
