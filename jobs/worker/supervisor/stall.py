"""Detects that a training run takes no steps any longer, while its ranks still answer one another. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S, FACTOR = 180.0, 10.0
"""A run hangs after this time without a step, or after so many times its longest step so far."""


@dataclass
class StallDetector:
    """Follows a run's events. Only the phase with steps counts: others, such as saving, print nothing."""

    longest: float = 0.0
    _since: float | None = None
    """The last sign of progress in the phase with steps."""
    _stepping: bool = False

    def see(self, kind: str, name: str, now: float) -> None:
        """Take an event; ``name`` is that of a phase."""
        if kind == "phase":
            # The first step may compile the model: it counts as the longest, and has no bound itself.
            self._since, self._stepping = (now if name == "train" else None), False
        elif kind == "step" and self._since is not None:
            self.longest = max(self.longest, now - self._since)
            self._since, self._stepping = now, True
        elif kind == "checkpoint" and self._since is not None:
            self._since = now

    def stalled(self, now: float) -> float:
        """Return the seconds without a step if they are too many; else 0."""
        if self._since is None or not self._stepping:
            return 0.0
        silent = now - self._since
        return silent if silent > max(LEAST_S, FACTOR * self.longest) else 0.0
