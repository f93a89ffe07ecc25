"""How an attempt ended: a state, its cause, or the decision to try again. Pure, except for asking Slurm."""

from __future__ import annotations

from typing import Any

from ..runtime.stopping import EXIT_CODE as STOPPED
from . import slurm
from .slurm import SlurmJob
from .supervise import Attempt

SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"


def conclude(
    code: int, attempt: Attempt, job: SlurmJob, retries: int, *, cancelled: bool
) -> dict[str, object] | None:
    """Return the job's state, exit code, and cause; ``None`` if it is to run again.

    A job runs again after the loss of a rank or node, not after an error of its program, which would
    only repeat itself.
    """
    errors = attempt.watch.errors
    cause = find_cause(errors)
    if code == 0:
        return _end(SUCCEEDED, code, {})
    if cancelled or (attempt.stopping and job.fate() == slurm.CANCELLED):
        return _end(CANCELLED, code, {})
    is_lost = code != STOPPED or attempt.stopping
    if is_lost and job.attempt <= retries and not _is_own_fault(cause):
        return None
    return _end(FAILED, int(cause.get("exit_code", code)), cause)


def find_cause(errors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the error that explains the others: those of ranks that only lost a peer come last."""
    causes = sorted(errors, key=lambda event: bool(event.get("lost_peer")))
    return causes[0] if causes else {}


def _is_own_fault(cause: dict[str, Any]) -> bool:
    return bool(cause) and not cause.get("lost_peer")


def _end(state: str, code: int, cause: dict[str, Any]) -> dict[str, object]:
    known = {name: cause.get(name) for name in ("rank", "host", "message")}
    return {"state": state, "exit_code": code, **known}
