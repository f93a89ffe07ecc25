"""This job as Slurm sees it, from inside its batch script."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .commands import succeeds
from .slurm_queue import ask_slurm

FATES = REQUEUED, NODE_FAIL, CANCELLED = "REQUEUED", "NODE_FAIL", "CANCELLED"


@dataclass(frozen=True)
class SlurmJob:
    """The job's number in the queue, its nodes in the order of their ranks, and how often it started."""

    id: str
    nodes: tuple[str, ...]
    attempt: int

    @staticmethod
    def from_environ(environ: Mapping[str, str] = os.environ) -> SlurmJob:
        """Return the job of this process."""
        names = _ask(["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]]).split()
        again = int(environ.get("SLURM_RESTART_COUNT") or 0)
        return SlurmJob(environ["SLURM_JOB_ID"], tuple(names), again + 1)

    def fate(self) -> str:
        """Return how Slurm ends the job, a word of :data:`FATES`; "" if it lets it run, or does not answer.

        While something of the job is left, Slurm's own word for all of them is COMPLETING.
        """
        known = dict(re.findall(r"(\w+)=(\S+)", _ask(["scontrol", "-o", "show", "job", self.id])))
        if known.get("JobState", "RUNNING") == "RUNNING":
            return ""
        if int(known.get("Restarts", 0)) >= self.attempt:
            return REQUEUED
        return NODE_FAIL if known.get("Reason") == "NodeDown" else CANCELLED

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the job's nodes that do not answer Slurm."""
        asked = f"--nodes={','.join(self.nodes)}"
        down = ["--states=down,no_respond", "--format=%N"]
        return tuple(_ask(["sinfo", "--noheader", "--Node", asked, *down]).split())

    @staticmethod
    def drained_nodes() -> str:
        """Return a line for each node of the cluster that gets no more jobs: its name and the reason."""
        return _ask(["sinfo", "--noheader", "--Node", "--states=drain", "--format=%N|%E"])

    def steps(self) -> tuple[str, ...]:
        """Return the job's running steps: mpirun starts one to reach its nodes."""
        found = _ask(["squeue", "--noheader", "--steps", f"--job={self.id}", "--format=%i"]).split()
        return tuple(step for step in found if step.rpartition(".")[2].isdecimal())

    def kill_step(self, step: str) -> None:
        """Kill the processes of a step on all its nodes."""
        # Not all steps at once by the job's number: without a step, that would end the job itself.
        succeeds(["scancel", "--quiet", "--signal=KILL", step])

    def requeue(self) -> bool:
        """Put the job back into the queue, which ends this process; return whether Slurm agreed."""
        return succeeds(["scontrol", "requeue", self.id])

    def keep_from_requeueing(self) -> None:
        """Let the loss of a node end the job from now on."""
        succeeds(["scontrol", "update", f"jobid={self.id}", "requeue=0"])


def _ask(argv: list[str]) -> str:
    # Without Slurm's own errors: the questions are asked again, and a job's log is the job's.
    return ask_slurm(argv) or ""
