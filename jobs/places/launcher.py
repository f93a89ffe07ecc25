"""The jobs that a launcher lists: their states and outcomes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from infra.cost.spending import Spending
from infra.errors import JobError, UsageError
from jobs.worker.supervisor.attempt import CANCELLED, FAILED, SUCCEEDED, describe
from jobs.worker.supervisor.deadline import count_node_s

__all__ = ["CANCELLED", "FAILED", "SUCCEEDED", "JobEnd", "Outcome", "parse_end"]
SUBMITTING, QUEUED, RUNNING = "submitting", "queued", "running"
REQUEUED, LOST = "requeued", "lost"


@dataclass(frozen=True)
class JobEnd:
    """A job's state, the times and nodes of its last attempt, and the cause of a failure.

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
    deadline: bool = False
    """Whether it was stopped because its nodes were about to shut down."""
    first: datetime | None = None
    """When its first attempt began."""
    starts: tuple[tuple[float, int], ...] = ()
    """When its attempts began, in seconds since 1970, and on how many nodes."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields for ``--json``."""
        values = [(k, v) for k, v in asdict(self).items() if k != "starts"]
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

    @property
    def earlier_s(self) -> float:
        """What passed between the beginnings of the first attempt and the last."""
        if self.first is None or self.began is None:
            return 0.0
        return round(max(0.0, (self.began - self.first).total_seconds()), 3)

    def node_s(self, share: float = 1.0, over: float = math.inf, nodes: int = 0) -> float:
        """Return for how many seconds of one node it pays: see :func:`count_node_s`."""
        if self.began is None or self.ended is None:
            return 0.0
        starts = self.starts or (((self.first or self.began).timestamp(), len(self.nodes)),)
        return count_node_s(starts, self.ended.timestamp(), share, over, nodes)


@dataclass
class Outcome:
    """What this process knows so far about the job it follows.

    ``state`` is empty until the job has ended. ``is_home`` says whether all of its results were fetched,
    ``missing``, line by line, which were not.
    """

    job: str = ""
    state: str = ""
    results: Path | None = None
    is_home: bool = False
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """Lines about a job's files that were fetched: what is ``missing``, and what else is to be ``said``."""

    missing: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


def parse_end(content: Mapping[str, Any] | str) -> JobEnd | None:
    """Return the content of ``end.json``, or its text; ``None`` if there is no valid one."""
    known = TypeAdapter(JobEnd)
    with suppress(ValidationError):
        if isinstance(content, str):
            return known.validate_json(content)
        return known.validate_python(content)
    return None


ACTIVE = (SUBMITTING, QUEUED, RUNNING, REQUEUED)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""The pattern of job IDs, which become parts of shell commands."""


@dataclass(frozen=True, kw_only=True)
class JobSummary(JobEnd):
    """One job and, if it has ended, its outcome. Unknown values are ``None``.

    ``state`` is submitting, queued, running, requeued (waiting to run again), succeeded, failed,
    cancelled, or lost (ended without a record, for example because the head shut down). A requeued job's
    ``message`` says what ended its last attempt. ``checkpoint`` is the name of the newest one.
    ``unfinished`` means that `train squad --resume` can resume it.
    """

    job: str
    submitted: datetime
    waits_for: str = ""
    """Why it is queued, in Slurm's words, such as ``Resources``."""
    ranks_per_node: int = 0
    cores: int | None = None
    memory_gib: int | None = None
    """Of each node, if it shares them."""
    command: str = ""
    owner: str = ""
    size_kib: int | None = None
    has_model: bool = False
    checkpoint: str | None = None
    unfinished: bool = False
    on_lost_head: bool = False
    """Whether its files were on a head that was lost: here is only how it ended."""
    bucket: str = ""
    """Where its folder is stored as well: ``s3://BUCKET/PREFIX``."""
    progress: str = ""
    """How many elements of an array have ended."""
    expected_end: datetime | None = None
    """When a job that trains will have made its last step, at its latest speed."""
    usd_per_hour: float | None = None
    """The price of its nodes on demand."""
    budget: float = 0.0
    max_time_s: float = 0.0
    """Its limits; 0 for none."""
    spent_s: float = 0.0
    spent_usd: float = 0.0
    """What its earlier attempts took of them, and the runs that it resumes."""

    def spending(self, now: datetime) -> Spending:
        """Return what it costs, at the price on demand, with its restarts.

        The cost of a job that ended at an unknown time is unknown.
        """
        end = now if self.is_active else self.ended
        took = max(0.0, (end - self.began).total_seconds()) if self.began and end else 0.0
        left = max(0.0, (self.expected_end - now).total_seconds()) if self.expected_end else None
        limits = self.budget, self.max_time_s, self.spent_s, self.spent_usd
        return Spending(took, left, self.usd_per_hour if end else None, *limits)

    @property
    def is_active(self) -> bool:
        """Whether the job runs or will run."""
        return self.state in ACTIVE


class LostFilesError(JobError):
    """A job's files were on a head that was lost. ``bucket`` has them as well, unless it is ""."""

    def __init__(self, job: JobSummary, flags: str) -> None:
        self.job, self.bucket = job.job, job.bucket
        hint = "with `up --bucket`, jobs are stored in S3 as well"
        if job.bucket:
            hint = f"to get them from {job.bucket}: spr-cluster fetch {job.job} {flags}".rstrip()
        super().__init__(f"the files of job {job.job} were on a head that is gone", hint=hint)


def require_files(job: JobSummary, flags: str) -> None:
    """Raise :class:`LostFilesError` if a job's files were on a head that was lost."""
    if job.on_lost_head:
        raise LostFilesError(job, flags)


def choose_job(
    jobs: tuple[JobSummary, ...], job_id: str | None, place: str = "on the head"
) -> JobSummary:
    """Return the job with that ID, or the newest. Raises :class:`UsageError` if there is none."""
    if not jobs:
        raise UsageError(f"there is no job {place}")
    found = [job for job in jobs if job_id in (None, job.job)]
    if not found:
        last = ", ".join(job.job for job in jobs[-5:])
        raise UsageError(f"there is no job {job_id} {place}", hint=f"the last ones are {last}")
    return found[-1]


def choose_active(
    jobs: tuple[JobSummary, ...],
    job_id: str | None,
    place: str = "on the head",
    *,
    every: bool = False,
) -> list[JobSummary]:
    """Return the job with that ID, or the only one that runs or waits, if any; with ``every``, all of these.

    Raises :class:`UsageError` if there are several, and for both a job ID and ``--all``.
    """
    if job_id is not None and every:
        raise UsageError("JOB and --all can't be used together")
    if job_id is not None:
        return [choose_job(jobs, job_id, place)]
    active = [job for job in jobs if job.is_active]
    if len(active) > 1 and not every:
        raise UsageError(
            f"{len(active)} jobs are running or queued",
            hint=f"name one of them: {', '.join(job.job for job in active[:5])}",
        )
    return active
