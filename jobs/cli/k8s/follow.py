"""Following of a job on Kubernetes: the display of `train`, from the events in the first rank's log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from cluster.cli.display import PlainProgress, TreeProgress
from infra.errors import JobError
from jobs.cli.job_display import JobDisplay
from jobs.launchers.job_state import SUCCEEDED
from jobs.launchers.kubernetes.errors import KubernetesError
from jobs.launchers.kubernetes.launcher import KubernetesLauncher
from jobs.launchers.launcher import JobSummary
from jobs.launchers.queue.job_output import JobOutput, explain, how_to_come_back, note_silence
from jobs.worker.supervisor.attempt import choose_cause


def follow(
    launcher: KubernetesLauncher, job: str, progress: PlainProgress | TreeProgress
) -> tuple[JobSummary, dict[str, Any]]:
    """Show a job until it ends; return its end and result. Raises :class:`JobError` if it fails."""
    display = JobDisplay(progress)
    output = JobOutput(display.event, display.log, job)
    with leaving_it(job, launcher), progress.phase(f"Follow {job}"), note_silence(output):
        end = launcher.follow(job, output.add, output.show, output.note_state)
    if end.state != SUCCEEDED:
        raise _failure(end, output, f"the whole log: spr-cluster logs {job} {launcher.flags}")
    return end, next((e for e in reversed(output.events) if e["event"] == "result"), {})


@contextmanager
def leaving_it(job: str, launcher: KubernetesLauncher) -> Iterator[None]:
    """After Ctrl-C or an error of the cluster, say that the job goes on, and how to see or end it."""
    try:
        yield
    except (KeyboardInterrupt, KubernetesError):
        with suppress(OSError):
            print(how_to_come_back(job, launcher.flags), file=sys.stderr)
        raise


def _failure(end: JobSummary, output: JobOutput, hint: str) -> JobError:
    """Return the root cause: a rank's own error, else what became of its pod."""
    cause = choose_cause([event for event in output.events if event["event"] == "error"])
    if cause:
        known = {key: cause[key] for key in ("rank", "host", "message") if key in cause}
        end = replace(end, **known)
    elif end.fix:
        hint = f"{end.fix}; {hint}"
    return explain(end, output, hint.rstrip())
