"""A cluster's own queue as a launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cluster.context import Context
from infra.errors import HostError, HostKeyError, SprError
from jobs.places import files
from jobs.places.launcher import RUNNING, Fetched, JobSummary
from jobs.places.plan import CHECKPOINT_SECONDS, STOP_SECONDS, JobPaths
from jobs.places.queue import history
from jobs.places.queue.history import LostHeadError, describe_expiry, explain_expiry, what_is_left
from jobs.places.queue.job_output import stop_job
from jobs.places.queue.slurm import SlurmLauncher
from jobs.places.record import claim_results
from provision.host import Host, TextSink


@dataclass(frozen=True)
class QueueLauncher:
    """The queue on the head of a cluster."""

    context: Context
    head: Host
    expires: datetime | None = None
    job_ends: datetime | None = None
    """When the nodes shut down at the latest while a job with a limit runs."""

    @property
    def place(self) -> str:
        """Its name in messages."""
        return f"on cluster {self.context.files.folder.name}"

    @property
    def where(self) -> dict[str, str]:
        """The same for ``--json``."""
        return {"cluster": self.context.files.folder.name}

    @property
    def flags(self) -> str:
        """The options that choose it, for the next command."""
        return self.context.flags

    def list_jobs(self) -> tuple[JobSummary, ...]:
        """Return the jobs in the order of submission. Raises :class:`HostError` without the head's answer."""
        return history.list_jobs(self.head)

    @property
    def outlook(self) -> str:
        """Return when the cluster and its jobs end; "" if never."""
        if self.expires is None:
            return ""
        return describe_expiry(self.expires, self.context.now(), self.flags, self.job_ends)

    def cancel(self, job: JobSummary, on_log: TextSink, *, now: bool) -> tuple[str, ...]:
        """End a job on all nodes; unless ``now``, one that trains saves a checkpoint first.

        Returns the names of nodes that can't be reached.
        """
        at_once = now or job.state != RUNNING
        # Programs that report steps can also save a checkpoint.
        saves = job.unfinished or job.expected_end is not None
        grace = 0 if at_once else CHECKPOINT_SECONDS if saves else STOP_SECONDS
        return stop_job(SlurmLauncher(self.head, self.flags), JobPaths(job.job), grace, on_log)

    def fetch(
        self, job: str, results: Path, note: Callable[[str], None], *, all_checkpoints: bool = False
    ) -> Fetched:
        """Download what is the user's of a job, its log, and its record."""
        claim_results(results, job)
        paths, choice = JobPaths(job), {"all_checkpoints": all_checkpoints}
        return files.fetch(self.head, paths, results, note, self.flags, **choice)

    def explain_loss(self, job: JobSummary, error: SprError) -> SprError | None:
        """Return why an unreachable job must be over; ``None`` if it may still be running."""
        if isinstance(error, HostKeyError) or not isinstance(error, HostError):
            return error
        gone = self.head.why_gone()
        if not gone:
            return None
        ctx = self.context
        over = explain_expiry(job.job, ctx.find_expiry(), ctx.now(), self.flags, gone)
        lost = LostHeadError(job.job, gone)
        known = job.job, self.flags, ctx.cloud.flag, (job.bucket, job.unfinished)
        lost.hint = what_is_left(*known, is_gone=ctx.is_gone())
        return over or lost
