"""A job's log, or that of one of its ranks, as it is on the nodes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from infra.errors import UsageError
from jobs.launch.history import JobSummary
from jobs.launch.plan import JobPaths
from jobs.worker.runtime.events import parse_event
from provision.host import Host, LineSink

_SCRIPT = """# reading a log
{read} &
reader=$!
while [ {follow} = 1 ] && kill -0 $reader 2>/dev/null && [ ! -e {end} ]; do
  found=$(squeue --noheader --name={job} --format=%A 2>/dev/null) && [ -z "$found" ] && break
  sleep 1
done
# What was printed last is read within a moment.
[ {follow} = 0 ] || {{ sleep 1; kill $reader; }} 2>/dev/null
wait $reader 2>/dev/null
true
"""


def read_log(
    head: Host, job: JobSummary, on_line: LineSink, rank: int | None = None, *, follow: bool = False
) -> None:
    """Pass on the log of a job or of one rank, line by line; with ``follow``, until the job ends.

    Raises :class:`UsageError` if the job has no such rank.
    """
    paths, follow = JobPaths(job.job), follow and job.is_active
    file = paths.log if rank is None else f"{paths.output}/logs/rank-{rank}.log"
    read = f"tail -n +1 {'-F -s 0.2 ' if follow else ''}{file} 2>/dev/null"
    if rank is not None:
        read = f"exec ssh -n {find_node(job, rank)} '{read}'"
    script = _SCRIPT.format(read=read, follow=int(follow), end=paths.end, job=job.job)
    head.run(script, timeout_s=None, on_line=on_line)


def find_node(job: JobSummary, rank: int) -> str:
    """Return the name of the node on which a rank runs or ran. Raises :class:`UsageError`."""
    if not job.nodes or not job.ranks_per_node:
        raise UsageError(f"job {job.job} has not started yet: it is {job.state}")
    if not 0 <= rank < job.ranks_per_node * len(job.nodes):
        last = job.ranks_per_node * len(job.nodes) - 1
        raise UsageError(f"--rank {rank}: job {job.job} has the ranks 0 to {last}")
    return job.nodes[rank // job.ranks_per_node]


def only_since(since: datetime, on_line: LineSink) -> Callable[[str], None]:
    """Return a sink that passes on the lines from the first event at or after a time."""
    begun = False

    def pass_on(line: str) -> None:
        nonlocal begun
        event = None if begun else parse_event(line)
        begun = begun or bool(event and float(event.get("at", 0)) >= since.timestamp())
        if begun:
            on_line(line)

    return pass_on
