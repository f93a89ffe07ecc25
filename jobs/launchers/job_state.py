"""The states of a job, and how it ended, as its first node wrote it on the head: ``end.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jobs.worker.supervisor.attempt import CANCELLED, FAILED, SUCCEEDED, describe

__all__ = ["CANCELLED", "FAILED", "SUCCEEDED", "JobEnd", "Outcome", "parse_end"]
SUBMITTING, QUEUED, RUNNING = "submitting", "queued", "running"
REQUEUED, LOST = "requeued", "lost"
SUSPENDED, DELETING, DELETED = "suspended", "deleting", "deleted"


@dataclass(frozen=True)
class JobEnd:
    """A job's state, times, and nodes of its last attempt, and if it failed, the cause.

    ``exit_code`` is that of the rank that failed first.
    """

    state: str
    exit_code: int | None = None
    began: datetime | None = None
    ended: datetime | None = None
    nodes: tuple[str, ...] = ()
    attempt: int = 0
    rank: int | None = None
    host: str | None = None
    message: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the fields for ``--json``."""
        values = asdict(self).items()
        return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in values}

    @property
    def cause(self) -> str:
        """Why it failed, with the rank and its host; "" if that is unknown."""
        return describe(vars(self))

    @property
    def seconds(self) -> float | None:
        """How long the last attempt took."""
        if self.began is None or self.ended is None:
            return None
        return round((self.ended - self.began).total_seconds(), 3)


@dataclass
class Outcome:
    """What this process knows so far of the job that it follows.

    ``state`` is empty until the job has ended. ``is_home`` says whether all of its results were fetched,
    ``missing``, line by line, which were not.
    """

    job: str = ""
    state: str = ""
    results: Path | None = None
    is_home: bool = False
    missing: tuple[str, ...] = ()


def parse_end(content: Mapping[str, Any] | str) -> JobEnd | None:
    """Return the content of ``end.json``, or its text; ``None`` if there is no valid one."""
    known = TypeAdapter(JobEnd)
    with suppress(ValidationError):
        if isinstance(content, str):
            return known.validate_json(content)
        return known.validate_python(content)
    return None
