"""What a measurement can be told; the machine that submits it has no torch, and imports this alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = 5.0
SHORTEST, LONGEST = 0.1, 600.0


@dataclass(frozen=True)
class BenchOptions:
    """``seconds`` is the time for each of the three measurements, start and end aside."""

    backend: str = "gloo"
    seconds: float = SECONDS

    def to_argv(self) -> list[str]:
        """The arguments from which :func:`parse_argv` makes this value again."""
        return [f"--backend={self.backend}", f"--seconds={self.seconds:g}"]


def parse_argv(argv: Sequence[str] | None = None) -> BenchOptions:
    """The options in ``argv``; a mistake ends with exit code 2."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure one rank's machine.")
    parser.add_argument("--backend", default=BenchOptions.backend, choices=("ccl", "gloo"))
    parser.add_argument("--seconds", type=float, default=BenchOptions.seconds)
    given = parser.parse_args(argv)
    return BenchOptions(given.backend, given.seconds)
