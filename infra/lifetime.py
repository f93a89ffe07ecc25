"""How long a machine lives: its deadline, the grace period for unfetched results, and when it is idle."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from infra.words import render_duration

AFTER = timedelta(minutes=10)
"""How long the second guard waits after a machine's deadline."""


@dataclass(frozen=True)
class Lifetime:
    """A machine powers off at ``expires``, unless the head holds it, and at ``latest`` in any case.

    ``grace`` is how long unfetched results may hold it. It also ends after ``idle``, unless that is 0.
    """

    expires: datetime
    latest: datetime
    grace: timedelta
    idle: timedelta = timedelta()

    @property
    def seconds(self) -> tuple[int, int, int, int]:
        """Deadline and latest end in seconds since 1970; grace period and idle timeout in seconds."""
        ends = int(self.expires.timestamp()), int(self.latest.timestamp())
        return (*ends, int(self.grace.total_seconds()), int(self.idle.total_seconds()))

    def __str__(self) -> str:
        """Return both times, such as ``2026-12-24 18:00:00 UTC, or held until 18:30:00``."""
        expires, latest = (datetime.fromtimestamp(each, timezone.utc) for each in self.seconds[:2])
        day = "" if expires.date() == latest.date() else f"{latest:%Y-%m-%d} "
        held = f", or held until {day}{latest:%H:%M:%S}" if latest > expires else ""
        idle = f", or after {render_duration(self.idle)} idle" if self.idle else ""
        return f"{expires:%Y-%m-%d %H:%M:%S} UTC{held}{idle}"

    @classmethod
    def parse(cls, text: str) -> Lifetime | None:
        """Parse what a machine's timer prints: three numbers, and the idle timeout if it has one."""
        words = text.split()
        if len(words) not in (3, 4) or not all(word.isdecimal() for word in words):
            return None
        expires, latest, grace, idle = (*map(int, words), 0)[:4]
        first, last = (datetime.fromtimestamp(each, timezone.utc) for each in (expires, latest))
        return cls(first, last, timedelta(seconds=grace), timedelta(seconds=idle))
