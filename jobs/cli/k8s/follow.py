"""Following of a job on Kubernetes: the display of `train`, from the events in the first rank's log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.display import PlainProgress, TreeProgress
from infra.errors import JobError
from infra.words import counted
from jobs.cli.job_display import JobDisplay, render_end
from jobs.cli.k8s.common import access_flags
from jobs.launchers.job_state import FAILED, SUCCEEDED, JobEnd
from jobs.launchers.kubernetes.errors import KubernetesError
from jobs.launchers.kubernetes.jobs import explain, follow_job
from jobs.launchers.kubernetes.problems import exit_code
from jobs.launchers.kubernetes.request import CLAIM_PATH
from jobs.launchers.kubernetes.resources import JobView
from jobs.launchers.queue.job_output import JobOutput, note_silence
from jobs.launchers.queue.job_output import explain as explain_end
from jobs.worker.supervisor.conclusion import choose_cause

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi


def follow(
    api: KubernetesApi, name: str, args: argparse.Namespace, progress: PlainProgress | TreeProgress
) -> int:
    """Show a job until it ends, and then its result. Raises :class:`JobError` if it fails."""
    display = JobDisplay(progress)
    output = JobOutput(display.event, display.log, name)
    with (
        leaving_it(name, args),
        progress.phase(f"Follow {name}"),
        note_silence(output),
    ):
        job = follow_job(api, name, output.add, lambda problem: output.show(str(problem)))
    if job.state != SUCCEEDED:
        raise _failure(api, job, output, args)
    result = next((e for e in reversed(output.events) if e["event"] == "result"), {})
    folder = Path(CLAIM_PATH, "jobs", name, "output")
    if args.json:
        print(json.dumps({**result, "job": name, "state": SUCCEEDED}))
    else:
        print(render_end(name, JobEnd(SUCCEEDED), result, folder))
        print(f"to fetch them: spr-cluster k8s fetch {name}{access_flags(args)}")
    return 0


@contextmanager
def leaving_it(name: str, args: argparse.Namespace) -> Iterator[None]:
    """After Ctrl-C or an error of the cluster, say that the job goes on, and how to see or end it."""
    try:
        yield
    except (KeyboardInterrupt, KubernetesError):
        flags = access_flags(args)
        with suppress(OSError):
            print(
                f"job {name} goes on without this command\n"
                f"  to follow it: spr-cluster k8s logs -f {name}{flags}\n"
                f"  to end it:    spr-cluster k8s delete {name}{flags}",
                file=sys.stderr,
            )
        raise


def _failure(
    api: KubernetesApi, job: JobView, output: JobOutput, args: argparse.Namespace
) -> JobError:
    """Return the root cause: a rank's own error, else what became of its pod."""
    hint = f"the whole log: spr-cluster k8s logs {job.name}{access_flags(args)}"
    cause = choose_cause([event for event in output.events if event["event"] == "error"])
    codes = [code for pod in job.pods if (code := exit_code(pod))]
    if not cause and (problems := explain(api, job)):
        first, *others = problems
        more = f" (and {counted(len(others), 'other reason')})" if others else ""
        fix = f"{first.fix}; {hint}" if first.fix else hint
        return JobError(f"job {job.name} failed: {first.text}{more}", hint=fix)
    known = {key: cause[key] for key in ("rank", "host", "message") if key in cause}
    return explain_end(JobEnd(FAILED, next(iter(codes), None), **known), output, hint)
