"""The jobs on a cluster's head: state, disk use, model, and newest checkpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter

from cluster.job_queue import PENDING
from infra.errors import UsageError
from infra.files import parse_object
from jobs.launchers.job_state import (
    CANCELLED,
    LOST,
    QUEUED,
    REQUEUED,
    RUNNING,
    SUBMITTING,
    parse_end,
)
from jobs.launchers.launcher import NAME, JobSummary
from jobs.worker.supervisor import listing
from jobs.worker.supervisor.attempt import FAILED
from provision.host import Host
from provision.run_on_nodes import send


def list_jobs(head: Host) -> tuple[JobSummary, ...]:
    """Return the jobs on a head, in the order of submission."""
    program = send(listing).render("listing the jobs")
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
