"""Following a job that another command submitted, on this machine or another one."""

from __future__ import annotations

from pathlib import Path

from infra.errors import JobError
from jobs.launch import files
from jobs.launch.ending import CANCELLED, SUCCEEDED, JobEnd
from jobs.launch.follow import JobOutput, explain, follow_job
from jobs.launch.plan import JobPaths
from jobs.launch.session import JobContext, say_how_to_come_back


def attach(context: JobContext, job: str, results: Path) -> JobEnd:
    """Show a job's output from its beginning, and fetch its results when it ends.

    Raises :class:`JobError` if it fails. Ctrl-C ends only the following.
    """
    head, paths = context.open_host(context.cluster.head), JobPaths(job)
    launcher = context.make_launcher(head, context.cluster.flags)
    output = JobOutput(context.on_event, context.on_log)
    with (
        context.progress.phase(f"Follow {job}"),
        say_how_to_come_back(context, paths),
    ):
        end = follow_job(launcher, paths, output)
        context.outcome.end(job, end, results)
    with context.progress.phase("Fetch the results"):
        missing = files.fetch(head, paths, results, context.on_log, context.cluster.flags)
        context.outcome.come_home(missing)
    if end.state != SUCCEEDED:
        hint = f"the whole log is {results / 'log'}"
        if end.state == CANCELLED or not (end.message or end.exit_code is not None):
            raise JobError(f"job {job} was {end.state}", hint=hint)
        raise explain(end, output, hint)
    return end
