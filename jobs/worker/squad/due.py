"""When a checkpoint is due: by steps where the user says so, else by time, at a small part of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_SECONDS = 600.0
"""So much training a machine that dies costs at most, on average half of it."""
MOST_SHARE = 0.02
"""Writing takes at most this part of the time, however slow the disk is."""
WORTH_SECONDS = 60.0
"""After the last step a checkpoint is written if at least so much is not in one yet: the evaluation,
too, may be interrupted."""


@dataclass
class Due:
    """``every`` is in steps; ``None`` means by time. Only rank 0's clock counts."""

    every: int | None
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None
    _cost: float = 0.0

    def by_step(self, step: int, *, last: bool) -> bool:
        """A checkpoint is due after this step; the same on every rank."""
        return self.every is not None and (last or step % self.every == 0)

    def by_time(self, *, last: bool) -> bool:
        """A checkpoint is due now, by this rank's clock."""
        now = self.clock()
        self._since = now if self._since is None else self._since
        if self.every is not None:
            return False
        least = self._cost / MOST_SHARE
        return now - self._since >= max(WORTH_SECONDS if last else EVERY_SECONDS, least)

    def saved(self, seconds: float) -> None:
        """A checkpoint was written, and took so long."""
        self._since, self._cost = self.clock(), seconds
