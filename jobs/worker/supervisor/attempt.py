"""How an attempt of a job ended: the state, the cause, and whether the job is to try again."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.process import STOPPED, explain_kill
from . import commands
from .commands import NODE_FAIL
from .head import SSH
from .watch import blame
from .watcher import Watcher

SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
_KILLED = 128 + signal.SIGKILL
_COPY_S, _HURRIED_COPY_S = 60.0, 5.0


def conclude(
    code: int, watcher: Watcher, *, cancelled: bool = False, last: bool = False
) -> dict[str, object] | None:
    """Return the job's state, exit code, and cause; ``None`` if it should run again, unless ``last``.

    A job runs again after losing a rank or node, not after an error of its program, which would recur.
    A rank whose program was killed is lost.
    """
    if code == 0:
        return _end(SUCCEEDED, code, {})
    if cancelled or (watcher.stopping and watcher.job.fate() == commands.CANCELLED):
        return _end(CANCELLED, code, {})
    cause = find_cause(watcher)
    is_lost = code != STOPPED or watcher.stopping
    # Somebody else killed the program, such as the kernel, and may not do so again.
    is_killed = cause.get("exit_code") == _KILLED
    own_fault = bool(cause) and not (cause.get("lost_peer") or is_killed)
    if (
        is_lost
        and not last
        and watcher.job.attempt <= watcher.launch.spec.recovery.retries
        and not own_fault
    ):
        return None
    return _end(FAILED, int(cause.get("exit_code", code)), cause)


def choose_copy_limit(code: int, fate: str, checkpoint_s: float = 0.0) -> float:
    """Return how many seconds an ended attempt waits for its last checkpoint's copies. Pure.

    Copying may take as long as saving.

    Slurm kills this process 30 s after it has lost a node, and a copy to that node may hang for longer: the
    job's end must be written before. Only ranks that were told to stop get the full time: after a failure, a
    node may be lost without Slurm knowing yet, and finished training needs no copies.
    """
    return max(_COPY_S, checkpoint_s) if code == STOPPED and not fate else _HURRIED_COPY_S


def find_cause(watcher: Watcher) -> dict[str, Any]:
    """Return why an attempt ended: a leaving node, a rank's error, a hang, or a lost peer or node."""
    log, job, size = watcher.log, watcher.job, watcher.launch.nproc_per_node
    for node, why in watcher.limited.items():
        return {"rank": job.nodes.index(node) * size, "host": node, "message": why}
    if watcher.leaving.get("until"):
        kept = f"; checkpoint {log.checkpoint} is kept" if log.checkpoint else ""
        return {**watcher.leaving, "message": watcher.leaving["message"] + kept}
    if known := watcher.leaving or choose_cause(log.errors, watcher.hang):
        return name_nodes(known, job.nodes, log.start, size)
    lost = describe_lost_nodes(job.lost_nodes(), job.nodes, size)
    killed = lost or describe_killed(log.killed, job.nodes)
    return killed or describe_lost_nodes(log.lost, job.nodes, size)


def name_nodes(
    cause: Mapping[str, Any], nodes: Sequence[str], start: Mapping[str, Any], ranks_per_node: int
) -> dict[str, Any]:
    """Return an error with the cluster's node names in place of host names. Pure.

    ``start`` is the ranks' report of where they run.
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
    """Return the root error: a rank's own error comes before those of ranks that lost a peer. Pure."""
    own = [event for event in errors if not event.get("lost_peer")]
    return next(iter([*own, *([hang] if hang else []), *errors]), {})


def describe_lost_nodes(
    lost: Sequence[str], nodes: Sequence[str], ranks_per_node: int
) -> dict[str, Any]:
    """Return the loss of the first of these nodes as an error of its first rank; {} for none. Pure."""
    if not lost or lost[0] not in nodes:
        return {}
    return blame(lost[0], nodes, ranks_per_node, f"its node, {lost[0]}, is down or cut off")


def describe_killed(killed: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """Return the rank that mpirun reported as killed before any rank did; {} for none.

    The report is read from the log, where a program could also write ssh's options.
    """
    if "signal" not in killed:
        return {}
    node, number = killed["node"], int(killed["signal"].partition(" ")[0])
    on = (*SSH, node) if node in nodes[1:] else ()
    pid = killed["pid"] if node in nodes else None
    message = f"killed by signal {killed['signal']}{explain_kill(number, pid, on)}"
    return {"rank": killed["rank"], "host": node, "message": message, "lost_peer": True}


def describe_dead(code: int, node: str, ended: str | None = None) -> dict[str, Any]:
    """Return a supervisor's end, given its shell's exit code, as an error. Pure.

    ``ended`` is Slurm's word for the end of a job that did not record it.
    """
    message = f"its batch process on {node} ended with exit code {code}"
    if ended == NODE_FAIL:
        message = f"one of its nodes went down before {node}, the first, recorded the end"
    elif ended:
        message = f"all its processes on {node} were killed, the batch process among them"
        message += f" (Slurm: {ended})"
    elif code > 128:
        message = f"its batch process on {node} was killed by signal {code - 128}"
    return {"host": node, "message": message, "lost_peer": bool(ended) or code > 128}


def describe(cause: Mapping[str, Any]) -> str:
    """Return a cause as a line; "" for none."""
    where = "" if cause.get("rank") is None else f"rank {cause['rank']} on {cause.get('host')}: "
    return f"{where}{cause['message']}" if cause.get("message") else ""


def _end(state: str, code: int, cause: dict[str, Any]) -> dict[str, object]:
    known = {name: cause.get(name) for name in ("rank", "host", "message")}
    deadline = {"deadline": True} if cause.get("deadline") else {}
    return {"state": state, "exit_code": code, **known, **deadline}
