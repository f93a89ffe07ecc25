"""How a job ended, as its first node wrote it on the head: ``end.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jobs.worker.batch.conclusion import CANCELLED, FAILED, SUCCEEDED

__all__ = ["CANCELLED", "FAILED", "SUCCEEDED", "JobEnd", "parse_end"]


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
        """Return the end for ``--json``."""
        times = {name: getattr(self, name) for name in ("began", "ended")}
        return {**asdict(self), **{k: at.isoformat() if at else None for k, at in times.items()}}

    @property
    def seconds(self) -> float | None:
        """How long the last attempt took."""
        if self.began is None or self.ended is None:
            return None
        return round((self.ended - self.began).total_seconds(), 3)


def parse_end(content: Mapping[str, Any] | str) -> JobEnd | None:
    """Return the content of ``end.json``, or its text; ``None`` if there is no valid one."""
    known = TypeAdapter(JobEnd)
    try:
        if isinstance(content, str):
            return known.validate_json(content)
        return known.validate_python(content)
    except ValidationError:
        return None
