"""The measurements of ``spr-cluster bench`` on the nodes, one process per rank.

mpirun starts it as ``python -m worker.bench OPTIONS``, with :class:`BenchOptions` as JSON; without them, it
also runs alone on any machine with torch.

Each rank measures with the cores and memory of a training job's rank. All ranks of a node measure at the same
time, so that a node's speed is the sum of its ranks. Units: TFLOPS (10^12 floating-point operations per
second; a multiply-add counts as two), GB/s (10^9 bytes per second).

The laptop, which has no torch, imports only this module of the package.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS = 5.0
SHORTEST, LONGEST = 0.1, 600.0


@dataclass(frozen=True)
class BenchOptions:
    """``seconds`` is the time for each of the three measurements."""

    backend: str = "gloo"
    seconds: float = SECONDS
