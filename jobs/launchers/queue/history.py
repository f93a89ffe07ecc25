"""The jobs on a cluster's head: state, disk use, model, and newest checkpoint."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter

from cluster.job_queue import PENDING
from cluster.node_program import render_program
from infra.errors import UsageError
from infra.files import parse_object
from jobs.launchers.job_state import (
    CANCELLED,
    FAILED,
    LOST,
    QUEUED,
    REQUEUED,
    RUNNING,
    SUBMITTING,
    JobEnd,
    parse_end,
)
from jobs.worker.supervisor import commands, listing, slurm_queue
from provision.host import Host

ACTIVE = (SUBMITTING, QUEUED, RUNNING, REQUEUED)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Job IDs: they become parts of commands."""


@dataclass(frozen=True, kw_only=True)
class JobSummary(JobEnd):
    """One job, and how it ended, as far as it has. What is unknown is ``None``.

    ``state`` is submitting, queued, running, requeued (waiting to run again), succeeded, failed,
    cancelled, or lost (ended without a trace, for example because the head was shut down). A requeued
    job's ``message`` says what ended its last attempt. ``checkpoint`` is the name of the newest one.
    ``unfinished`` means that `train squad --resume` can resume it.
    """

    job: str
    submitted: datetime
    waits_for: str = ""
    """Slurm's reason while the job is queued, such as ``Resources``."""
    ranks_per_node: int = 0
    size_kib: int = 0
    has_model: bool = False
    checkpoint: str | None = None
    unfinished: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the job runs or will run."""
        return self.state in ACTIVE


def list_jobs(head: Host) -> tuple[JobSummary, ...]:
    """Return the jobs on a head, in the order of submission."""
    program = render_program("listing the jobs", (commands, slurm_queue, listing))
    return parse_jobs(head.run(program).stdout)


def parse_jobs(text: str) -> tuple[JobSummary, ...]:
    """Return the jobs in the output of :mod:`jobs.worker.supervisor.listing`."""
    known = TypeAdapter(JobSummary)
    found = []
    for line in text.splitlines():
        # There may be others, such as a banner's lines.
        with suppress(UsageError, ValueError, LookupError, TypeError, AttributeError):
            row = parse_object(line, "job")
            if NAME.fullmatch(row["job"]):
                found.append(known.validate_python(_merge(row)))
    return tuple(sorted(found, key=lambda job: (job.submitted, job.job)))


def _merge(row: dict[str, Any]) -> dict[str, Any]:
    """Return a job's values: those of its end prevail over those of its beginning."""
    end = row["end"] if parse_end(row["end"]) else _find_lost_node(row)
    state, reason = _state(row, end)
    return {**row["begin"], **end, **row, "state": state, "waits_for": reason}


def _find_lost_node(row: dict[str, Any]) -> dict[str, Any]:
    """Return the end that a job's first node could not write, because it was lost itself; {} for none."""
    nodes = row["begin"].get("nodes")
    if row["queue"] != [] or row["cancelled"] or not (nodes and row.get("node_lost")):
        return {}
    return {"state": FAILED, "host": nodes[0], "message": f"its first node, {nodes[0]}, went down"}


def _state(row: dict[str, Any], end: dict[str, Any]) -> tuple[str, str]:
    """Return the job's state, and why it waits."""
    if end:
        return end["state"], ""
    if row["queue"]:
        slurm, reason, _ = row["queue"]
        if slurm != PENDING:
            return RUNNING, ""
        return (REQUEUED if row["begin"] else QUEUED), reason
    if row["queue"] is None:  # Slurm does not answer
        return (RUNNING if row["begin"] else QUEUED), "Slurm does not answer"
    if row["cancelled"]:
        return CANCELLED, ""
    return (SUBMITTING if row.get("coming") else LOST), ""


def choose_job(jobs: tuple[JobSummary, ...], job_id: str | None) -> JobSummary:
    """Return the job with that ID, or the newest. Raises :class:`UsageError` if there is none."""
    if not jobs:
        raise UsageError("there is no job on the head of this cluster")
    found = [job for job in jobs if job_id in (None, job.job)]
    if not found:
        last = ", ".join(job.job for job in jobs[-5:])
        raise UsageError(f"there is no job {job_id} on the head", hint=f"the last ones are {last}")
    return found[-1]


def choose_shown(jobs: tuple[JobSummary, ...], job_id: str | None) -> JobSummary:
    """Return the job with that ID, the only active one, or if none is active, the newest."""
    return choose_active(jobs, job_id) or choose_job(jobs, job_id)


def choose_some(jobs: tuple[JobSummary, ...], job_id: str | None) -> list[JobSummary]:
    """Return the result of :func:`choose_active` in a list."""
    found = choose_active(jobs, job_id)
    return [found] if found else []


def choose_all(jobs: tuple[JobSummary, ...], job_id: str | None) -> list[JobSummary]:
    """Return all jobs that run or wait. Raises :class:`UsageError` if one is named as well."""
    if job_id is not None:
        raise UsageError("JOB and --all can't be used together")
    return [job for job in jobs if job.is_active]


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
