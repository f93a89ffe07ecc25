"""The embedded cloud's time: one clock for all that EC2 does slowly."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class ServerClock(Protocol):
    """Time as an argument, so that a test can let a machine boot for twenty minutes at once."""

    def time(self) -> float:
        """Seconds since 1970, as :func:`time.time` has them; they go on while no server runs."""
        ...


class SystemTime:
    """The machine's own time."""

    def time(self) -> float:
        return time.time()


def as_moto_time(seconds: float) -> datetime:
    """A moment as moto keeps it: UTC without saying so."""
    return datetime.fromtimestamp(seconds, timezone.utc).replace(tzinfo=None)
