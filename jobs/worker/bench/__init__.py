"""The measurements of ``spr-cluster bench`` on the nodes, one process per rank.

mpirun starts it as ``python -m worker.bench``; it also runs alone on any machine with torch.

Each rank measures with the cores and memory of a training job's rank. All ranks of a node measure at the same
time, so that a node's speed is the sum of its ranks. Units: TFLOPS (10^12 floating-point operations per
second; a multiply-add counts as two), GB/s (10^9 bytes per second).

The laptop, which has no torch, imports only this module of the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = 5.0
SHORTEST, LONGEST = 0.1, 600.0


@dataclass(frozen=True)
class BenchOptions:
    """``seconds`` is the time for each of the three measurements."""

    backend: str = "gloo"
    seconds: float = SECONDS

    def to_argv(self) -> list[str]:
        """Return the arguments for :func:`parse_argv`."""
        return [f"--backend={self.backend}", f"--seconds={self.seconds:g}"]


def parse_argv(argv: Sequence[str] | None = None) -> BenchOptions:
    """Return the options in ``argv``. A usage error ends with exit code 2."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure one rank's machine.")
    parser.add_argument("--backend", default=BenchOptions.backend, choices=("ccl", "gloo"))
    parser.add_argument("--seconds", type=float, default=BenchOptions.seconds)
    given = parser.parse_args(argv)
    return BenchOptions(given.backend, given.seconds)
