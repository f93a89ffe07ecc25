"""A cluster's own queue as a launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.context import Context
from infra.errors import HostError, HostKeyError, JobError, SprError
from jobs.launchers import files
from jobs.launchers.launcher import LOST, RUNNING, Fetched, JobEnd, JobSummary
from jobs.launchers.plan import CHECKPOINT_SECONDS, STOP_SECONDS, JobPaths
from jobs.launchers.queue import history
from jobs.launchers.queue.history import describe_expiry, explain_expiry
from jobs.launchers.queue.job_output import stop_job
from jobs.launchers.queue.slurm import SlurmLauncher
from jobs.launchers.record import claim_results
from provision.host import Host, TextSink


@dataclass(frozen=True)
class QueueLauncher:
    """A :class:`jobs.launchers.launcher.Launcher`: the queue on the head of a cluster."""

    context: Context
    head: Host
    expires: datetime | None = None

    @property
    def place(self) -> str:
        return f"on cluster {self.context.files.folder.name}"

    @property
    def where(self) -> dict[str, str]:
        return {"cluster": self.context.files.folder.name}

    @property
    def example(self) -> str:
        return "train squad"

    @property
    def flags(self) -> str:
        return self.context.flags

    def list_jobs(self) -> tuple[JobSummary, ...]:
        """Raises :class:`HostError` while the head does not answer."""
        return history.list_jobs(self.head)

    def describe(self, job: JobSummary) -> tuple[Mapping[str, Any], Sequence[str]]:
        folder = JobPaths(job.job).root
        return {"folder": folder}, (f"its files are in {folder} on node0",)

    @property
    def outlook(self) -> str:
        """Return when the cluster and its jobs end; "" if never."""
        if self.expires is None:
            return ""
        return describe_expiry(self.expires, self.context.now(), self.flags)

    def follow(self, job: str, on_text: TextSink, on_wait: TextSink, on_state: TextSink) -> JobEnd:
        return self._slurm.follow(JobPaths(job), on_text, on_wait, on_state)

    def read_log(
        self, job: JobSummary, on_text: TextSink, rank: int | None = None, *, follow: bool
    ) -> None:
        try:
            history.read_log(self.head, job, on_text, rank, follow=follow)
        finally:
            self.head.close()

    def can_cancel(self, job: JobSummary) -> bool:
        return job.is_active or job.state == LOST

    def cancel(self, job: JobSummary, on_log: TextSink, *, now: bool) -> tuple[str, ...]:
        at_once = now or job.state != RUNNING
        # Programs that report steps can also save a checkpoint.
        saves = job.unfinished or job.expected_end is not None
        grace = 0 if at_once else CHECKPOINT_SECONDS if saves else STOP_SECONDS
        return stop_job(self._slurm, JobPaths(job.job), grace, on_log)

    def fetch(
        self, job: str, results: Path, note: Callable[[str], None], *, all_checkpoints: bool = False
    ) -> Fetched:
        claim_results(results, job)
        paths, choice = JobPaths(job), {"all_checkpoints": all_checkpoints}
        return files.fetch(self.head, paths, results, note, self.flags, **choice)

    def explain_loss(self, job: str, error: SprError) -> SprError | None:
        if isinstance(error, HostKeyError) or not isinstance(error, HostError):
            return error
        gone = self.head.why_gone()
        if not gone:
            return None
        ctx = self.context
        over = explain_expiry(job, ctx.find_expiry(), ctx.now(), self.flags, gone)
        return over or JobError(f"job {job} ended with its head node: {gone}")

    @property
    def _slurm(self) -> SlurmLauncher:
        return SlurmLauncher(self.head, self.flags)
