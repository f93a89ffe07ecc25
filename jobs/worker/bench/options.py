"""Options of a measurement. The laptop, which has no torch, imports only this module."""

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
        """Return the arguments from which :func:`parse_argv` restores this value."""
        return [f"--backend={self.backend}", f"--seconds={self.seconds:g}"]


def parse_argv(argv: Sequence[str] | None = None) -> BenchOptions:
    """Return the options in ``argv``. A usage error ends with exit code 2."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure one rank's machine.")
    parser.add_argument("--backend", default=BenchOptions.backend, choices=("ccl", "gloo"))
    parser.add_argument("--seconds", type=float, default=BenchOptions.seconds)
    given = parser.parse_args(argv)
    return BenchOptions(given.backend, given.seconds)
