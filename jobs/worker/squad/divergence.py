"""Whether a loss still goes where it should: a run that has gone astray costs as much as a good one."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMOOTHING = 0.05
"""A step's weight in the running level, which so follows about the last 20 steps."""
PATIENCE = 100
"""So many steps in a row the level must be too high. Peaks of a few steps are part of learning."""
MARGIN = 2.0
"""The level may rise above the best one by so much, or by the best one itself where that is more.

A model that answers by chance has a loss of about the logarithm of its tokens, 5.9 for 384, and a
good one less than 1.5: between them lies more than this, and between two good epochs much less."""


@dataclass
class DivergenceDetector:
    """Follows the loss of each step; the same on all ranks, as the loss is."""

    level: float | None = None
    """The loss's running mean."""
    best: float = math.inf
    """The lowest that it has been."""
    high: int = 0
    """For so many steps in a row it has been far above that."""

    def see(self, loss: float) -> None:
        """Take the next step's loss."""
        self.level = loss if self.level is None else self.level + SMOOTHING * (loss - self.level)
        self.best = min(self.best, self.level)
        self.high = self.high + 1 if self.level > self.limit else 0

    @property
    def limit(self) -> float:
        """The level above which it is far off."""
        return self.best + max(MARGIN, self.best)

    @property
    def suspicious(self) -> bool:
        """The level is too high now: nothing that a good checkpoint should make room for."""
        return self.high > 0

    @property
    def diverged(self) -> bool:
        """It has been too high for long."""
        return self.high >= PATIENCE
