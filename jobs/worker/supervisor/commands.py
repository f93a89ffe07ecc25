"""Run commands that may fail, hang, or be missing, among them Slurm's: its queue, and this job in it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from ..runtime.cores import LIMITS

_TIMEOUT_S, _POLL_S = 30.0, 0.05
SSH_FAILED, _REFUSED_S, _PAUSE_S = 255, 2.0, (0.2, 1.5)
FATES = REQUEUED, NODE_FAIL, CANCELLED = "REQUEUED", "NODE_FAIL", "CANCELLED"
_LOWER = "{ echo 19 > /proc/self/autogroup; } 2>/dev/null"
# Linux takes one such change per 0.1 s from all users but root, and some kernels and containers take none.
LOW_PRIORITY = f"{_LOWER} || {{ sleep 0.3; {_LOWER}; }} || :; exec nice -n 19"
"""Prefix of a shell command that must not delay ranks. The caller starts it in its own session.

``nice`` alone is not enough, because Linux may first divide CPU time among sessions ("autogroup" in
https://man7.org/linux/man-pages/man7/sched.7.html).
"""
# Slurm's reasons that name neither the missing node nor the cause.
_MISSING = ("ReqNodeNotAvail", "Nodes required for job are DOWN")
_GONE = "--states=drain,down,no_respond"
DRAINED = ("sinfo", "--noheader", "--Node", "--states=drain", "--format=%N|%E")
"""Prints a line for each drained node of the cluster: its name and the reason."""
IDLE = (
    *("sh", "-c"),
    '[ "$(squeue --noheader --states=pending --format=%A)" ] || '
    "sinfo --noheader --Node --states=idle --format=%N",
)
"""Prints the idle nodes of the cluster, one per line, if no job waits for them."""
PART = (*LIMITS, "cores")
REPORT = "limited"
"""In a job's folder on a node: why the node ended a job that shares it."""


def ask(argv: Sequence[str], timeout_s: float = _TIMEOUT_S) -> str | None:
    """Return a command's output; ``None`` if it fails: if Slurm does not answer, for one."""
    with suppress(OSError):
        found = Running(argv, timeout_s).wait()
        return None if found.why else found.printed
    return None


def succeeds(argv: Sequence[str], timeout_s: float = _TIMEOUT_S, **options: Any) -> bool:
    """Return whether a command succeeds. ``options`` are ``subprocess.run``'s."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(argv, timeout=timeout_s, check=False, **options).returncode == 0
    return False


def run_ssh(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command that uses SSH, up to three times if the node refuses the connection.

    sshd does so, at random, while many others log in. A node that takes longer to fail is gone.
    """
    for tried in range(3):
        time.sleep(random.uniform(*_PAUSE_S) if tried else 0)
        begin = time.monotonic()
        done = subprocess.run(argv, check=False, **options)
        if done.returncode != SSH_FAILED or time.monotonic() - begin > _REFUSED_S:
            break
    return done


class Running:
    """A command that runs beside this process, in its own session, for a limited time.

    When it has ended, ``printed`` is its output, and ``why`` the reason if it failed.
    """

    def __init__(self, argv: Sequence[str], limit_s: float) -> None:
        self.printed = self.why = ""
        self._limit_s, self._until = limit_s, time.monotonic() + limit_s
        # Not on a disk, which may be full, nor in pipes, which may fill up.
        self._files = [os.fdopen(os.memfd_create(name), "w+b") for name in ("output", "errors")]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        # With `env`, a missing program is an error like others.
        output, errors = self._files
        self._process = subprocess.Popen(["env", *argv], stdout=output, stderr=errors, **options)

    def poll(self) -> bool:
        """Return whether it has ended."""
        if not self._files:
            return True
        code = self._process.poll()
        if code is None and time.monotonic() < self._until:
            return False
        if code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.printed, said = map(_read_all, self._files)
        self._files = []
        if code is None:
            self.why = f"it took longer than {self._limit_s / 60:.0f} min"
        elif code:
            self.why = said.splitlines()[-1] if said else f"exit code {code}"
        return True

    def wait(self) -> Running:
        """Wait for its end."""
        while not self.poll():
            time.sleep(_POLL_S)
        return self


def _read_all(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace").strip()


def find_missing(reason: str) -> str:
    """Return which nodes are unavailable and why; "None" if that is no longer so."""
    if not reason.startswith(_MISSING):
        return reason
    nodes = ask(["sinfo", "--noheader", "--Node", _GONE, "--format=%t %N %E"])
    if nodes is None:
        return reason
    drained = [line.split(" ", 1)[1] for line in nodes.splitlines() if line.startswith("dr")]
    return "; ".join(drained) or (reason if nodes else "None")


@dataclass(frozen=True)
class SlurmJob:
    """The job's number in the queue, its nodes in rank order, and its number of starts."""

    id: str
    nodes: tuple[str, ...]
    attempt: int

    @staticmethod
    def from_environ() -> SlurmJob:
        """Return the job of this process."""
        environ = os.environ
        names = _ask(["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]]).split()
        again = int(environ.get("SLURM_RESTART_COUNT") or 0)
        return SlurmJob(environ["SLURM_JOB_ID"], tuple(names), again + 1)

    def fate(self) -> str:
        """Return how Slurm is ending the job, one of :data:`FATES`; "" if it is running or Slurm is silent.

        While any process of the job is left, Slurm itself says COMPLETING for all of them.
        """
        known = dict(re.findall(r"(\w+)=(\S+)", _ask(["scontrol", "-o", "show", "job", self.id])))
        # FAILED: it ended without Slurm, and the keeper has this process finish it.
        if known.get("JobState", "RUNNING") in ("RUNNING", "FAILED"):
            return ""
        if int(known.get("Restarts", 0)) >= self.attempt:
            return REQUEUED
        return NODE_FAIL if known.get("Reason") == "NodeDown" else CANCELLED

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the job's nodes that do not answer Slurm."""
        asked = f"--nodes={','.join(self.nodes)}"
        down = ["--states=down,no_respond", "--format=%N"]
        return tuple(_ask(["sinfo", "--noheader", "--Node", asked, *down]).split())

    def ask_part(self) -> dict[str, Any]:
        """Return the job's cores on each of its nodes. Raises :class:`RuntimeError` without an answer."""
        for pause in (0.0, 1.0, 5.0):
            time.sleep(pause)
            with suppress(ValueError, KeyError):
                found = json.loads(_ask([*PART, self.id]))
                return {name: found[name] for name in self.nodes}
        raise RuntimeError("Slurm does not say which cores the job has")

    def ask_limited(self, folder: str) -> dict[str, str]:
        """Return why nodes ended the job there, by their names."""
        found = {}
        for name in self.nodes:
            argv = [] if name == self.nodes[0] else ["ssh", "-o", "ConnectTimeout=5", name]
            if said := _ask([*argv, "cat", f"{folder}/{REPORT}"]):
                found[name] = said
        return found

    def kill_steps(self) -> None:
        """Kill the processes of the job's steps on all nodes; mpirun reaches its nodes through a step."""
        found = _ask(["squeue", "--noheader", "--steps", f"--job={self.id}", "--format=%i"]).split()
        # One by one: the job's number alone, without a step, would end the job itself.
        for step in (each for each in found if each.rpartition(".")[2].isdecimal()):
            succeeds(["scancel", "--quiet", "--signal=KILL", step])

    def requeue(self) -> bool:
        """Requeue the job, which ends this process; return whether Slurm accepted."""
        return succeeds(["scontrol", "requeue", self.id])

    def keep_from_requeueing(self) -> None:
        """From now on, the loss of a node ends the job."""
        succeeds(["scontrol", "update", f"jobid={self.id}", "requeue=0"])


def _ask(argv: Sequence[str]) -> str:
    return ask(argv) or ""  # callers ask again
