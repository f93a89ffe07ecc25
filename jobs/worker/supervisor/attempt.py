"""One attempt of a job: run mpirun to its end, then determine the job's state and its cause, or decide to
try again.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..runtime.process import SENDERS, STOPPED
from . import commands
from .commands import NODE_FAIL, SlurmJob
from .deadline import DeadlineWatch
from .launch import FOLDER, Launch, build_argv
from .watch import (
    WAIT_S,
    IdleWatch,
    LogWatch,
    NoticeWatch,
    announce,
    describe_notice,
    has_no_room,
    measure_ranks,
)

SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
ERROR_GRACE_S = 15.0
"""Time for mpirun to end after a rank has failed: a node may be gone."""
LEAVE_S = 60.0
"""Time for ranks to save a checkpoint and exit when one of their nodes leaves."""
POLL_S = 0.2
_COPY_S, _HURRIED_COPY_S = 60.0, 5.0


@dataclass
class Attempt:
    """A run of mpirun. ``stop`` may be called from a signal handler."""

    launch: Launch
    job: SlurmJob
    watch: LogWatch
    notices: NoticeWatch
    stopping: bool = False
    leaving: dict[str, Any] = field(default_factory=dict)
    """Why the ranks were told to stop, if one of their nodes leaves or the deadline is near."""
    hang: dict[str, Any] = field(default_factory=dict)
    """Why the attempt was killed, if no rank made progress for too long."""
    deadline: DeadlineWatch = field(default_factory=DeadlineWatch)
    _idle: IdleWatch | None = None
    _process: subprocess.Popen[bytes] | None = None
    _forwarded_at: float | None = None

    def stop(self) -> None:
        """Tell the ranks to save a checkpoint and exit."""
        self.stopping = True

    def run(self) -> int:
        """Run mpirun to its end and return its exit code."""
        self._process = subprocess.Popen(
            ["bash", "-c", render_script(self.launch, self.job.nodes)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        # A program on the user's terminal waits for the user.
        if "--terminal" not in self.launch.program:
            self._idle = IdleWatch(partial(measure_ranks, mark_folder(self.launch)))
        while True:
            try:
                code = self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                self._look_after()
            else:
                self.watch.poll()
                self.kill()
                if code and not self.stopping:
                    self._blame_node()
                return code if code >= 0 else 128 - code

    def _look_after(self) -> None:
        self.watch.poll()
        failed, now = self.watch.failed_at, time.monotonic()
        if (
            not self.stopping
            and failed is None
            and (found := self._find_notice() or self.deadline.find_end(self.watch.checkpoint_s))
        ):
            self.leaving = found
            announce(event="note", text=f"{found['message']}; saving a checkpoint and stopping")
            self.stop()
        if self.stopping and self._forwarded_at is None:
            self._forwarded_at = now
            self._forward()
        if (failed is not None and now - failed > ERROR_GRACE_S) or self._is_left(now):
            self.kill()
        elif not self.hang and (silent := self.watch.steps.stalled(now)):
            message = f"no step for {silent / 60:.0f} min: a rank hangs"
            self.hang = {"message": message, "lost_peer": True}
            self.kill()
        elif self._idle and (silent := self._idle.find(self.watch.offset, now)):
            job, node = Path(self.launch.folder).name, self.job.nodes[0]
            text = f"no rank on {node} has used CPU time for {silent / 60:.0f} min, and nothing was printed"
            announce(
                event="note", text=f"warning: {text}; to end the job: spr-cluster cancel {job}"
            )
            self.watch.poll()
            self._idle.size = self.watch.offset

    def _is_left(self, now: float) -> bool:
        """Return whether the ranks had enough time to save a checkpoint: before a deadline, all there is."""
        if not self.leaving or self._forwarded_at is None:
            return False
        is_late = time.time() > float(self.leaving.get("until", 0.0))
        return now - self._forwarded_at > LEAVE_S and is_late

    def _blame_node(self) -> None:
        """Determine whether the ranks failed because a node leaves."""
        is_full = self.watch.disk_full or has_no_room()
        if is_full:
            self.notices.wait(self.job.nodes, WAIT_S)
        if is_full or not self.watch.errors:
            self.leaving = self._find_notice()

    def _find_notice(self) -> dict[str, Any]:
        return describe_notice(self.notices.found, self.job.nodes, self.launch.nproc_per_node)

    def _forward(self) -> None:
        """Pass SIGTERM to mpirun, which passes it to every rank of every node and waits for them."""
        assert self._process is not None
        group = str(self._process.pid)
        # Not to the shell scripts around it, which would not wait for the ranks.
        found = subprocess.run(["pkill", "-TERM", "-g", group, "-x", "mpiexec.hydra"], check=False)
        if found.returncode:
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the remaining processes of this attempt on all nodes."""
        self._signal_group(signal.SIGKILL)
        self.job.kill_steps()

    def kill_rest(self) -> None:
        """Kill the processes that another supervisor of this job left on all nodes."""
        mark = mark_folder(self.launch)
        for environ in Path("/proc").glob("[0-9]*/environ"):
            pid = int(environ.parent.name)
            with suppress(OSError):
                if pid != os.getpid() and mark in environ.read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        self.kill()

    def _signal_group(self, number: int) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def mark_folder(launch: Launch) -> bytes:
    """Return what the environment of all processes of a job on its first node contains."""
    return f"{FOLDER}={launch.folder}".encode()


def render_script(launch: Launch, nodes: Sequence[str]) -> str:
    """Return the shell script that execs mpirun."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.exports.items()]
    # Resolved now: a replacement node has the same name but another address.
    argv = build_argv(launch, nodes, socket.gethostbyname(nodes[0]))
    command = " ".join(shlex.quote(word) for word in argv)
    # After the setup, because oneCCL's script selects the older MPI that it ships.
    return "\n".join([*launch.setup, *exports, f"exec {command}", ""])


def conclude(
    code: int, attempt: Attempt, *, cancelled: bool = False, last: bool = False
) -> dict[str, object] | None:
    """Return the job's state, exit code, and cause; ``None`` if it should run again, unless ``last``.

    A job runs again after losing a rank or node, not after an error of its program, which would recur.
    """
    if code == 0 and not attempt.leaving.get("limit"):
        return _end(SUCCEEDED, code, {})
    if cancelled or (attempt.stopping and attempt.job.fate() == commands.CANCELLED):
        return _end(CANCELLED, code, {})
    cause = find_cause(attempt)
    is_lost = code != STOPPED or attempt.stopping
    own_fault = bool(cause) and not cause.get("lost_peer")
    if (
        is_lost
        and not last
        and attempt.job.attempt <= attempt.launch.spec.recovery.retries
        and not own_fault
    ):
        return None
    return _end(FAILED, int(cause.get("exit_code", code)), cause)


def choose_copy_limit(code: int, fate: str) -> float:
    """Return how many seconds an ended attempt waits for its last checkpoint's copies. Pure.

    Slurm kills this process 30 s after it has lost a node, and a copy to that node may hang for longer: the
    job's end must be written before. Only ranks that were told to stop get the full time: after a failure, a
    node may be lost without Slurm knowing yet, and finished training needs no copies.
    """
    return _COPY_S if code == STOPPED and not fate else _HURRIED_COPY_S


def find_cause(attempt: Attempt) -> dict[str, Any]:
    """Return why an attempt ended: a leaving node, a rank's error, a hang, or a lost peer or node."""
    watch, job, size = attempt.watch, attempt.job, attempt.launch.nproc_per_node
    if attempt.leaving.get("until"):
        kept = f"; checkpoint {watch.checkpoint} is kept" if watch.checkpoint else ""
        return {**attempt.leaving, "message": attempt.leaving["message"] + kept}
    if known := attempt.leaving or choose_cause(watch.errors, attempt.hang):
        return name_nodes(known, job.nodes, watch.start, size)
    lost = describe_lost_nodes(job.lost_nodes(), job.nodes, size)
    killed = lost or describe_killed(watch.killed)
    return killed or describe_lost_nodes(watch.lost, job.nodes, size)


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
    rank = nodes.index(lost[0]) * ranks_per_node
    message = f"its node, {lost[0]}, is down or cut off"
    return {"rank": rank, "host": lost[0], "message": message, "lost_peer": True}


def describe_killed(killed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rank that mpirun reported as killed before any rank did; {} for none. Pure."""
    if "signal" not in killed:
        return {}
    why = SENDERS.get(int(killed["signal"].partition(" ")[0]), "")
    message = f"killed by signal {killed['signal']}{why}"
    return {"rank": killed["rank"], "host": killed["node"], "message": message, "lost_peer": True}


def describe_dead(code: int, node: str, ended: str | None = None) -> dict[str, Any]:
    """Return a supervisor's end, given its shell's exit code, as an error. Pure.

    ``ended`` is Slurm's word for the end of a job that did not record it.
    """
    if ended == NODE_FAIL:
        message = f"one of its nodes went down before {node}, the first, recorded the end"
        return {"host": node, "message": message, "lost_peer": True}
    if ended:
        message = f"all its processes on {node} were killed, the batch process among them"
        return {"host": node, "message": f"{message} (Slurm: {ended})", "lost_peer": True}
    if code > 128:
        message = f"its batch process on {node} was killed by signal {code - 128}"
        return {"host": node, "message": message, "lost_peer": True}
    return {"host": node, "message": f"its batch process on {node} ended with exit code {code}"}


def describe(cause: Mapping[str, Any]) -> str:
    """Return a cause as a line; "" for none."""
    where = "" if cause.get("rank") is None else f"rank {cause['rank']} on {cause.get('host')}: "
    return f"{where}{cause['message']}" if cause.get("message") else ""


def _end(state: str, code: int, cause: dict[str, Any]) -> dict[str, object]:
    known = {name: cause.get(name) for name in ("rank", "host", "message")}
    deadline = {"deadline": True} if cause.get("deadline") else {}
    return {"state": state, "exit_code": code, **known, **deadline}
