"""The jobs on a cluster's head: state, disk use, model, and newest checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from cluster.job_queue import PENDING
from infra.errors import JobError, UsageError
from jobs.launch.ending import CANCELLED, FAILED, JobEnd, parse_end
from jobs.launch.head_program import render_program
from jobs.worker.batch.conclusion import describe
from provision.host import Host

QUEUED, RUNNING, REQUEUED, LOST = "queued", "running", "requeued", "lost"
ACTIVE = (QUEUED, RUNNING, REQUEUED)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    ArithmeticError,
    OSError,
)


@dataclass(frozen=True)
class JobSummary:
    """One job. Times, ``exit_code``, and the cause of a failure are ``None`` where they are unknown.

    ``state`` is queued, running, requeued (waiting to run again), succeeded, failed, cancelled, or lost
    (ended without a trace, for example because the head was shut down). ``nodes`` are those of its last
    attempt. ``checkpoint`` is the name of the newest one, "" for none. ``unfinished`` means that
    `train squad --resume` can resume it.
    """

    job: str
    state: str
    submitted: datetime
    began: datetime | None = None
    ended: datetime | None = None
    exit_code: int | None = None
    rank: int | None = None
    host: str | None = None
    message: str | None = None
    waits_for: str = ""
    """Slurm's reason while the job is queued, such as ``Resources``."""
    nodes: tuple[str, ...] = ()
    attempt: int = 0
    ranks_per_node: int = 0
    size_kib: int = 0
    has_model: bool = False
    checkpoint: str = ""
    unfinished: bool = False

    @property
    def cause(self) -> str:
        """Why it failed, with the rank and its host; "" if that is unknown."""
        return describe(vars(self))

    @property
    def is_active(self) -> bool:
        """Whether the job runs or will run."""
        return self.state in ACTIVE

    def as_dict(self) -> dict[str, object]:
        """Return the job for ``--json``."""
        times = {name: getattr(self, name) for name in ("submitted", "began", "ended")}
        written = {name: each.isoformat() if each else None for name, each in times.items()}
        return {**asdict(self), **written, "checkpoint": self.checkpoint or None}


def list_jobs(head: Host) -> tuple[JobSummary, ...]:
    """Return the jobs on a head, in the order of submission."""
    return parse_jobs(head.run(render_program("listing the jobs", "listing.py")).stdout)


def parse_jobs(text: str) -> tuple[JobSummary, ...]:
    """Return the jobs in the output of :mod:`jobs.worker.batch.listing`."""
    found = []
    for line in text.splitlines():
        try:
            found.append(_parse(json.loads(line)))
        except _UNREADABLE:
            continue  # such as a banner's line
    return tuple(sorted(found, key=lambda job: (job.submitted, job.job)))


def _parse(row: dict[str, Any]) -> JobSummary:
    if not _NAME.fullmatch(row["job"]):
        raise ValueError
    begin, end = row["begin"], parse_end(row["end"]) or _find_lost_node(row)
    state, reason = _state(row, end)
    known = end or JobEnd(state)
    return JobSummary(
        job=row["job"],
        state=state,
        submitted=_time(row["submitted"]),
        began=known.began or (_time(begin["began"]) if "began" in begin else None),
        ended=known.ended,
        exit_code=known.exit_code,
        rank=known.rank,
        host=known.host,
        message=known.message,
        waits_for=reason,
        nodes=known.nodes or tuple(begin.get("nodes", ())),
        attempt=known.attempt or int(begin.get("attempt", 0)),
        ranks_per_node=int(begin.get("ranks_per_node", 0)),
        size_kib=int(row["kib"]),
        has_model=bool(row["model"]),
        checkpoint=str(row["checkpoint"]),
        unfinished=bool(row["training"] and not row["finished"]),
    )


def _find_lost_node(row: dict[str, Any]) -> JobEnd | None:
    """Return the end that a job's first node could not write, because it was lost itself."""
    nodes = row["begin"].get("nodes")
    if row["queue"] != [] or row["cancelled"] or not (nodes and row.get("node_lost")):
        return None
    return JobEnd(FAILED, host=nodes[0], message=f"its first node, {nodes[0]}, went down")


def _state(row: dict[str, Any], end: JobEnd | None) -> tuple[str, str]:
    """Return the job's state, and why it waits."""
    if end:
        return end.state, ""
    if row["queue"]:
        slurm, reason, _ = row["queue"]
        if slurm != PENDING:
            return RUNNING, ""
        return (REQUEUED if row["begin"] else QUEUED), reason
    if row["queue"] is None:  # Slurm does not answer
        return (RUNNING if row["begin"] else QUEUED), "Slurm does not answer"
    return (CANCELLED if row["cancelled"] else LOST), ""


def _time(seconds: float) -> datetime:
    """Return a time in UTC from seconds since 1970."""
    return datetime.fromtimestamp(int(seconds), timezone.utc)


def check_job_id(job: str) -> None:
    """Raise :class:`UsageError` unless this can be a job ID: it becomes part of a command."""
    if not _NAME.fullmatch(job):
        raise UsageError(
            f"{job!r} is not a job ID",
            hint="expected one such as squad-20260731-142501-k3f; `spr-cluster jobs` lists them",
        )


def choose_job(jobs: tuple[JobSummary, ...], job_id: str | None) -> JobSummary:
    """Return the job with that ID, or the newest. Raises :class:`UsageError` if there is none."""
    if not jobs:
        raise UsageError("there is no job on the head of this cluster")
    return jobs[-1] if job_id is None else _find(jobs, job_id, jobs[-5:])


def choose_active(jobs: tuple[JobSummary, ...], job_id: str | None) -> JobSummary | None:
    """Return the job with that ID, or the only one that runs or waits; ``None`` if there is none.

    Raises :class:`UsageError` if there are several.
    """
    if job_id is not None:
        return choose_job(jobs, job_id)
    active = [job for job in jobs if job.is_active]
    if len(active) > 1:
        raise UsageError(
            f"{len(active)} jobs are running or queued",
            hint=f"name one of them: {', '.join(job.job for job in active[:5])}",
        )
    return active[0] if active else None


def _find(
    jobs: tuple[JobSummary, ...], job_id: str, candidates: Sequence[JobSummary]
) -> JobSummary:
    found = next((job for job in jobs if job.job == job_id), None)
    if found is None:
        names = ", ".join(job.job for job in candidates)
        hint = f"the last ones are {names}" if names else "`spr-cluster jobs` lists all jobs"
        raise UsageError(f"there is no job {job_id} on the head", hint=hint)
    return found


def newest_model(jobs: tuple[JobSummary, ...]) -> JobSummary:
    """Return the newest job that has a model. Raises :class:`JobError` if none has."""
    having = [job for job in jobs if job.has_model]
    if not having:
        raise JobError("no job on this cluster has a model", hint="`train squad` trains one")
    return having[-1]


def choose_unfinished(jobs: tuple[JobSummary, ...], job_id: str | None, cluster: str) -> JobSummary:
    """Return the training job with that ID; by default the last unfinished one.

    One with a checkpoint is preferred. Raises :class:`UsageError` if there is none, or it has nothing
    left to do, or it is not over.
    """
    unfinished = [job for job in jobs if job.unfinished and not job.is_active]
    if job_id is None and unfinished:
        # A job that failed in its first seconds must not hide hours of work.
        return ([job for job in unfinished if job.checkpoint] or unfinished)[-1]
    if job_id is None:
        raise UsageError(
            f"no unfinished training job on cluster {cluster}",
            hint="`train squad` without --resume starts one",
        )
    found = _find(jobs, job_id, unfinished[-3:])
    if found.is_active:
        raise UsageError(
            f"job {job_id} is {found.state}", hint=f"to follow it: spr-cluster attach {job_id}"
        )
    if not found.unfinished:
        raise UsageError(
            f"job {job_id} has nothing to resume: it is finished, or not a training job"
        )
    return found
