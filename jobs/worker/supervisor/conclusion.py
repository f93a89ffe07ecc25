"""How an attempt ended: a state, its cause, or the decision to try again. Pure, except for asking Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    if code == 0:
        return _end(SUCCEEDED, code, {})
    if cancelled or (attempt.stopping and job.fate() == slurm.CANCELLED):
        return _end(CANCELLED, code, {})
    cause = find_cause(attempt)
    is_lost = code != STOPPED or attempt.stopping
    if is_lost and job.attempt <= retries and not _is_own_fault(cause):
        return None
    return _end(FAILED, int(cause.get("exit_code", code)), cause)


def find_cause(attempt: Attempt) -> dict[str, Any]:
    """Return what explains the end of an attempt.

    That is a node that goes, a rank's own error, a hang, a lost peer, or a lost node.
    """
    watch, job, size = attempt.watch, attempt.job, attempt.launch.nproc_per_node
    if known := attempt.leaving or choose_cause(watch.errors, attempt.hang):
        return name_nodes(known, job.nodes, watch.start, size)
    lost = describe_lost_nodes(job.lost_nodes(), job.nodes, size)
    killed = lost or describe_killed(watch.killed)
    return killed or describe_lost_nodes(watch.lost, job.nodes, size)


def name_nodes(
    cause: Mapping[str, Any], nodes: Sequence[str], start: Mapping[str, Any], ranks_per_node: int
) -> dict[str, Any]:
    """Return an error with the cluster's names of nodes instead of their own host names. Pure.

    ``start`` is the ranks' own report of where they run.
    """
    named = dict(cause)
    hosts, rank = start.get("hosts", []), cause.get("rank")
    if rank is not None and rank // ranks_per_node < len(nodes):
        named["host"] = nodes[rank // ranks_per_node]
    if len(hosts) == len(nodes):
        for place, host in enumerate(hosts):
            message = str(named.get("message", ""))
            named["message"] = re.sub(rf"\b{re.escape(host)}\b", nodes[place], message)
    return named


def choose_cause(
    errors: Sequence[dict[str, Any]], hang: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the error that explains the others: those of ranks that only lost a peer come last. Pure."""
    own = [event for event in errors if not event.get("lost_peer")]
    return next(iter([*own, *([hang] if hang else []), *errors]), {})


def describe_lost_nodes(
    lost: Sequence[str], nodes: Sequence[str], ranks_per_node: int
) -> dict[str, Any]:
    """Return the loss of the first of these nodes as the error of its first rank; {} for none. Pure."""
    if not lost or lost[0] not in nodes:
        return {}
    rank = nodes.index(lost[0]) * ranks_per_node
    message = f"its node, {lost[0]}, is down or cut off"
    return {"rank": rank, "host": lost[0], "message": message, "lost_peer": True}


def describe_killed(killed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rank that mpirun saw killed before the others could say so; {} for none. Pure."""
    if "signal" not in killed:
        return {}
    message = f"killed by signal {killed['signal']}"
    return {"rank": killed["rank"], "host": killed["node"], "message": message, "lost_peer": True}


def describe_dead(code: int, node: str) -> dict[str, Any]:
    """Return the end of a batch process, with its shell's exit code, as an error. Pure."""
    if code > 128:
        message = f"its batch process on {node} was killed by signal {code - 128}"
        return {"host": node, "message": message, "lost_peer": True}
    return {"host": node, "message": f"its batch process on {node} ended with exit code {code}"}


def describe(cause: Mapping[str, Any]) -> str:
    """Return a cause as a line; "" for none."""
    where = "" if cause.get("rank") is None else f"rank {cause['rank']} on {cause.get('host')}: "
    return f"{where}{cause['message']}" if cause.get("message") else ""


def _is_own_fault(cause: dict[str, Any]) -> bool:
    return bool(cause) and not cause.get("lost_peer")


def _end(state: str, code: int, cause: dict[str, Any]) -> dict[str, object]:
    known = {name: cause.get(name) for name in ("rank", "host", "message")}
    return {"state": state, "exit_code": code, **known}
