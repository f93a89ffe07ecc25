"""The loop of a running job: what may end it is noticed or heard of here, and acted on here.

Ranks and mpirun report in the log, and the nodes' health checks through Slurm; docs/recovery.md lists who
notices what. If a rank dies, the others report it (``runtime/heartbeat.py``). Here, mpirun is killed if it
does not end by itself. Then :mod:`.attempt` decides, and ``__main__`` requeues the job or writes its end.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..runtime.process import FOLDER, STOPPED
from .commands import DRAINED, IDLE, SlurmJob
from .deadline import SHOW, Deadline, time_to_save
from .launch import Launch, build_argv
from .nodes import newest_step
from .transfers import Transfer
from .watch import (
    LEAST_S,
    NOTICES,
    IdleWatch,
    LogWatch,
    Poll,
    announce,
    blame,
    describe_notice,
    measure_ranks,
)

ERROR_GRACE_S = 15.0
"""Time for mpirun to end after a rank has failed: a node may be gone."""
LEAVE_S = 60.0
"""The least time for ranks to save a checkpoint and exit when one of their nodes leaves."""
WAIT_S = 12.0
"""Time after which the health check has also noticed what a rank noticed."""
POLL_S = 0.1
_NO_ROOM_BYTES = 1 << 20
NOTICES_S, DEADLINE_S, IDLE_S = 5.0, 10.0, 15.0
"""Time between questions about drained nodes, about the deadline, and about idle nodes."""
GROW_S = 120.0
"""Time for which a job that lost nodes runs without them before it starts again with those that came back."""


@dataclass
class Watcher:
    """What is known of a running job."""

    launch: Launch
    job: SlurmJob
    log: LogWatch
    deadline: Deadline = field(default_factory=Deadline)
    transfers: Sequence[Transfer] = ()
    stopping: bool = False
    """Whether the ranks are to save a checkpoint and exit."""
    leaving: dict[str, Any] = field(default_factory=dict)
    """Why they are, if one of their nodes leaves or the deadline is near."""
    hang: dict[str, Any] = field(default_factory=dict)
    """Why they were killed, if no rank made progress for too long."""
    notices: dict[str, str] = field(default_factory=dict)
    """The reasons of all leaving nodes of the cluster."""
    newest: int = -1
    """The step of the newest checkpoint on this node."""
    limited: dict[str, str] = field(default_factory=dict)
    """Why nodes ended a job that shares them, by their names."""
    returned: Sequence[str] = ()
    """Idle nodes that a job on fewer nodes than planned could use."""
    _idle: IdleWatch | None = None
    _process: subprocess.Popen[bytes] | None = None
    _forwarded_at: float | None = None

    def __post_init__(self) -> None:
        self.lifetime = Poll(SHOW, DEADLINE_S, self.deadline.take)
        self._drained = Poll(DRAINED, NOTICES_S, self._take_notices)
        self._idle_nodes = Poll(IDLE, IDLE_S, self._take_idle)
        self._begin = time.monotonic()

    def stop(self) -> None:
        """Tell the ranks to save a checkpoint and exit."""
        self.stopping = True

    def _take_notices(self, text: str) -> None:
        rows = (line.split("|", 1) for line in text.splitlines() if "|" in line)
        self.notices = {node: why for node, why in rows if why.partition(":")[0] in NOTICES}

    def _take_idle(self, text: str) -> None:
        self.returned = [name for name in text.split() if name in self.launch.pinning]

    def _may_grow(self) -> bool:
        """Return whether the job may start again only to get more nodes; a loss may need its last restart."""
        launch, recovery = self.launch, self.launch.spec.recovery
        is_small = len(self.job.nodes) < launch.planned_nodes
        return recovery.least_nodes > 0 and is_small and self.job.attempt < recovery.retries

    def wait(self, until: Callable[[], bool], limit_s: float = math.inf) -> None:
        """The loop: take what is new, until a condition holds or the time is over."""
        end = time.monotonic() + limit_s
        while True:
            now = time.monotonic()
            self.log.poll()
            self.lifetime.turn(now)
            self._drained.turn(now)
            if self._may_grow():
                self._idle_nodes.turn(now)
            self.newest = newest_step(self.launch.folder)
            for each in self.transfers:
                each.turn(self.newest, now)
            if until() or now > end:
                return
            time.sleep(POLL_S)

    def run(self) -> int:
        """Run mpirun to its end and return its exit code; :data:`.STOPPED` for a program that had to stop."""
        self._process = subprocess.Popen(
            ["bash", "-c", render_script(self.launch, self.job.nodes)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        # A program on the user's terminal waits for the user.
        if "--terminal" not in self.launch.program:
            self._idle = IdleWatch(partial(measure_ranks, mark_folder(self.launch)))
        self.wait(self._has_ended)
        was_stopping = self.stopping
        self.log.poll()
        self.kill()
        code = self._process.wait()
        if code == 0 and was_stopping and not self.launch.spec.work.task:
            # A user's program may save what it has and exit with 0. One that really finished in that moment
            # counts as stopped as well: to run it again is safer than to take half of its work for all.
            code = STOPPED
        if code and self.log.has_stopped:
            code = STOPPED  # mpirun's own may be 255: it got the signal as well
        if code and self.launch.spec.resources.cores:
            self.limited = self.job.ask_limited(self.launch.folder)
        if code and not self.stopping:
            self._blame_node()
        return code if code >= 0 else 128 - code

    def settle(self, limit_s: float) -> None:
        """Wait at most so long until the newest checkpoint is where it is to be kept."""
        for each in self.transfers:
            each.hurry()
        self.wait(
            lambda: all(each.is_settled(self.newest, time.monotonic()) for each in self.transfers),
            limit_s,
        )

    def _has_ended(self) -> bool:
        """Return whether mpirun has ended; until then, act on what is known."""
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        self.stop_if_leaving()
        self._note_lost_node()
        now, failed = time.monotonic(), self.log.failed_at
        # A checkpoint is written between two steps.
        save_s = time_to_save(self.log.checkpoint_s, LEAST_S)
        if self.stopping and self._forwarded_at is None:
            self._forwarded_at = now
            self._forward(self._process.pid)
        if (failed is not None and now - failed > ERROR_GRACE_S) or self._is_left(now):
            self.kill()
        elif not self.hang and (silent := self.log.steps.stalled(now, save_s)):
            message = f"no step for {silent / 60:.0f} min: a rank hangs"
            self.hang = {"message": message, "lost_peer": True}
            self.kill()
        elif self._idle and (silent := self._idle.find(self.log.offset, now)):
            self._warn_idle(self._idle, silent)
        return False

    def stop_if_leaving(self) -> None:
        """Tell the ranks to stop if a node leaves or the job's time is over."""
        if self.stopping or self.log.failed_at is not None:
            return
        times = self.log.checkpoint_s, self.log.measured_s
        self.leaving = self._find_notice() or self.deadline.find_end(*times)
        if self.returned and not self.leaving and time.monotonic() - self._begin > GROW_S:
            text = f"{' and '.join(self.returned)} can be used again"
            self.leaving = blame(self.job.nodes[0], self.job.nodes, 1, text)
        if self.leaving:
            # A program may or may not save one; before the ranks start, there is nothing to save.
            trains = self._process and self.launch.spec.work.task not in ("", "predict")
            how = "saving a checkpoint and stopping" if trains else "stopping"
            announce(event="note", text=f"{self.leaving['message']}; {how}")
            self.stop()

    def _note_lost_node(self) -> None:
        """Notice that mpirun lost a node and has killed the ranks: under Slurm, it may then wait forever."""
        log = self.log
        if log.lost and log.failed_at is None and not measure_ranks(mark_folder(self.launch)):
            log.failed_at = time.monotonic()

    def _warn_idle(self, idle: IdleWatch, silent: float) -> None:
        job, node = Path(self.launch.folder).name, self.job.nodes[0]
        text = f"no rank on {node} has used CPU time for {silent / 60:.0f} min, and nothing was printed"
        announce(event="note", text=f"warning: {text}; to end the job: spr-cluster cancel {job}")
        self.log.poll()
        idle.size = self.log.offset

    def _is_left(self, now: float) -> bool:
        """Return whether the ranks had enough time to save a checkpoint: before a deadline, all there is."""
        if not self.leaving or self._forwarded_at is None:
            return False
        if until := self.leaving.get("until"):
            return time.time() > float(until)
        return now - self._forwarded_at > time_to_save(self.log.checkpoint_s, LEAVE_S)

    def _blame_node(self) -> None:
        """Determine whether the ranks failed because a node leaves."""
        is_full = self.log.disk_full or shutil.disk_usage(".").free < _NO_ROOM_BYTES
        if is_full:
            self.wait(lambda: bool(self._find_notice()), WAIT_S)
        if is_full or not self.log.errors:
            self.leaving = self._find_notice()

    def _find_notice(self) -> dict[str, Any]:
        return describe_notice(self.notices, self.job.nodes, self.launch.nproc_per_node)

    def _forward(self, group: int) -> None:
        """Pass SIGTERM to mpirun, which passes it to every rank of every node and waits for them."""
        # Not to the shell scripts around it, which would not wait for the ranks.
        argv = ["pkill", "-TERM", "-g", str(group), "-x", "mpiexec.hydra"]
        if subprocess.run(argv, check=False).returncode:
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
