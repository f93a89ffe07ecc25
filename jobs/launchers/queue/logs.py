"""A job's log, or that of one of its ranks, as it is on the nodes."""

from __future__ import annotations

from infra.errors import UsageError
from jobs.launchers.launcher import JobSummary
from jobs.launchers.plan import JobPaths
from jobs.worker.supervisor import log_reader
from provision.host import Host, TextSink
from provision.run_on_nodes import send


def read_log(
    head: Host, job: JobSummary, on_text: TextSink, rank: int | None = None, *, follow: bool = False
) -> None:
    """Pass on the log of a job or of one rank, in whole lines; with ``follow``, until the job ends.

    Raises :class:`UsageError` if the job has no such rank.
    """
    paths = JobPaths(job.job)
    name = "log" if rank is None else f"output/logs/rank-{rank}.log"
    what = (paths.root, name, job.job if follow and job.is_active else "", "1", "")
    node = "" if rank is None else find_node(job, rank)
    if rank is None:  # of a job that was resumed
        earlier = (
            f"# reading the log of earlier runs\ncat {paths.root}/log.earlier 2>/dev/null || true"
        )
        head.run(earlier, timeout_s=None, on_text=on_text)
    program = send(log_reader, *what).render("reading a log", node)
    head.run(program, timeout_s=None, on_text=on_text)


def find_node(job: JobSummary, rank: int) -> str:
    """Return the name of the node on which a rank runs or ran. Raises :class:`UsageError`."""
    if not job.nodes or not job.ranks_per_node:
        raise UsageError(f"job {job.job} has not started yet: it is {job.state}")
    if not 0 <= rank < job.ranks_per_node * len(job.nodes):
        last = job.ranks_per_node * len(job.nodes) - 1
        raise UsageError(f"--rank {rank}: job {job.job} has the ranks 0 to {last}")
    return job.nodes[rank // job.ranks_per_node]
