"""Divergence detection: a run that has diverged costs as much as a good one."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMOOTHING = 0.05
"""A step's weight in the running mean, which thus covers about the last 20 steps."""
PATIENCE = 100
"""Steps in a row with too high a mean. Peaks of a few steps are normal."""
MARGIN = 2.0
"""The mean may rise above the best one by this much, or by the best one itself if that is more.

A model that answers at random has a loss of about the logarithm of its tokens, 5.9 for 384, and a good one
less than 1.5: they differ by more than this, and two good epochs by much less."""


@dataclass
class DivergenceDetector:
    """Follows the loss of each step, which is the same on all ranks."""

    level: float | None = None
    """The loss's running mean."""
    best: float = math.inf
    """The lowest running mean so far."""
    high: int = 0
    """The number of steps in a row in which it was above :attr:`limit`."""

    def see(self, loss: float) -> None:
        """Add the next step's loss."""
        self.level = loss if self.level is None else self.level + SMOOTHING * (loss - self.level)
        self.best = min(self.best, self.level)
        self.high = self.high + 1 if self.level > self.limit else 0

    @property
    def limit(self) -> float:
        """The running mean above which a loss is suspicious."""
        return self.best + max(MARGIN, self.best)

    @property
    def suspicious(self) -> bool:
        """The running mean is too high now, so that no good checkpoint should be replaced."""
        return self.high > 0

    @property
    def diverged(self) -> bool:
        """The running mean has been too high for :data:`PATIENCE` steps."""
        return self.high >= PATIENCE
