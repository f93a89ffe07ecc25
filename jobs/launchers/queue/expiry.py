"""The end of a cluster's time to live, which ends its jobs: said before, and warned of while a job runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cluster.local_files import utc_now
from infra.errors import JobError
from infra.words import spoken_day, spoken_time

_SOON = timedelta(minutes=10)
_MARGIN_H = 0.5


def describe_expiry(expires: datetime, now: datetime, flags: str) -> str:
    """Return when the nodes shut down, and how to change it."""
    when = spoken_time(expires, now)
    return f"Nodes shut down automatically at {when}. To extend: spr-cluster extend 2h {flags}"


def explain_expiry(
    job: str, expires: datetime | None, now: datetime, flags: str, why: str
) -> JobError | None:
    """Return the error for a job whose nodes shut down at their time; ``None`` if that is to come."""
    if expires is None or now < expires:
        return None
    return JobError(
        f"job {job} ended with its cluster, whose time to live was over at "
        f"{spoken_day(expires, now.date())}: {why}",
        hint=f"`spr-cluster up {flags}` creates new nodes; --ttl keeps them longer",
    )


@dataclass
class ExpiryWatch:
    """Warns once if a job will not be done in time, and once when the end is near.

    ``find`` asks EC2 for the end: `extend` may have changed it since.
    """

    expires: datetime | None
    flags: str
    show: Callable[[str], None]
    find: Callable[[], datetime | None] = lambda: None
    now: Callable[[], datetime] = utc_now
    _warned_late: bool = False
    _warned_soon: bool = False

    def see_eta(self, seconds: float) -> None:
        """Take note of the time that training still needs."""
        done = self.now() + timedelta(seconds=seconds)
        if not self._warned_late and self._ends_before(done) and self.expires:
            self._warned_late = True
            hours = math.ceil((done - self.expires).total_seconds() / 3600 + _MARGIN_H)
            self._warn(
                f"training would end at about {spoken_day(done, self.now().date())}, after that",
                hours,
            )

    def tick(self) -> None:
        """Warn if it is time to."""
        if not self._warned_soon and self._ends_before(self.now() + _SOON):
            self._warned_soon = True
            self._warn("the job and its checkpoints end with them", 2)

    def explain(self, job: str, why: str) -> JobError | None:
        """Return the error for a job that failed because the end has come, if it has."""
        over = self._ends_before(self.now())
        return explain_expiry(job, self.expires, self.now(), self.flags, why) if over else None

    def _ends_before(self, time: datetime) -> bool:
        if self.expires and self.expires <= time:
            self.expires = self.find() or self.expires
        return self.expires is not None and self.expires <= time

    def _warn(self, why: str, hours: int) -> None:
        assert self.expires
        self.show(
            f"warning: the nodes shut down at {spoken_time(self.expires, self.now())}; {why}\n"
            f"  to keep them longer: spr-cluster extend {hours}h {self.flags}"
        )
