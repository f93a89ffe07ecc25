"""Jobs on a cluster's head: states, checkpoints, logs, and the deadline that ends them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import TypeAdapter

from cluster.local_files import utc_now
from infra.ec2.cluster_record import spoken_end
from infra.errors import JobError, UsageError
from infra.files import parse_object
from infra.words import spoken_day, spoken_time
from jobs.places.launcher import (
    ACTIVE,
    CANCELLED,
    LOST,
    NAME,
    QUEUED,
    REQUEUED,
    RUNNING,
    SUBMITTING,
    JobSummary,
    parse_end,
)
from jobs.places.plan import JobPaths
from jobs.worker.array.plan import ELEMENTS, LOG
from jobs.worker.runtime.output import LOGS
from jobs.worker.storage.ownership import STATE
from jobs.worker.supervisor import listing, log_reader
from provision.host import Host, TextSink
from provision.on_node.unfetched import PENDING
from provision.run_on_nodes import send

_SOON = timedelta(minutes=10)
_MARGIN_H = 0.5


def describe_expiry(
    expires: datetime, now: datetime, flags: str, job_ends: datetime | None = None
) -> str:
    """Return when the nodes shut down and the command that changes it."""
    when = spoken_end(expires, job_ends, now)
    return f"Nodes shut down automatically at {when}. To extend: spr-cluster extend 2h {flags}"


def explain_expiry(
    job: str, expires: datetime | None, now: datetime, flags: str, why: str
) -> JobError | None:
    """Return the error for a job whose nodes reached their deadline; ``None`` before it."""
    if expires is None or now < expires:
        return None
    return JobError(
        f"job {job} ended with its cluster, whose time to live was over at "
        f"{spoken_day(expires, now.date())}: {why}",
        hint=f"`spr-cluster up {flags}` creates new nodes; --ttl keeps them longer",
    )


class LostHeadError(JobError):
    """A job ended with its head node, for the reason ``why``."""

    def __init__(self, job: str, why: str) -> None:
        super().__init__(f"job {job} ended with its head node: {why}")


def what_is_left(job: str, flags: str, cloud: str, kept: tuple[str, bool], *, is_gone: bool) -> str:
    """Return the hint after the loss of the head, or if ``is_gone``, of all nodes.

    ``kept`` is the URL below which the job's folder is stored, "" for none, and whether `train --resume` can
    continue it from there; ``cloud`` is the option for that bucket's cloud.
    """
    if not is_gone:
        return (
            f"`spr-cluster repair {flags}` makes a worker the head, where a job with retries "
            f"starts again; to follow it: spr-cluster attach {job} {flags}"
        )
    lines = [f"the cluster is gone: `spr-cluster up {flags}` creates a new one"]
    bucket, resumes = kept
    if bucket:
        place, task = f"{bucket}/{job}", job.partition("-")[0]
        if resumes:
            how = f"spr-cluster train {task} --resume {place} {flags}"
            lines.append(f"to continue there from the job's last checkpoint: {how}")
        lines.append(f"to get what the job stored: spr-cluster fetch {place}{cloud}")
    return "\n  → ".join(lines)


@dataclass
class ExpiryWatch:
    """Warns once if a job will not finish in time, and once when the deadline is near.

    ``find`` reads the deadline from EC2: `extend` may have changed it. ``stored`` is the job's URL in S3.
    """

    expires: datetime | None
    flags: str
    show: Callable[[str], None]
    find: Callable[[], datetime | None] = lambda: None
    now: Callable[[], datetime] = utc_now
    stored: str = ""
    _warned_late: bool = False
    _warned_soon: bool = False

    def see_eta(self, seconds: float) -> None:
        """Record how much time training still needs."""
        done = self.now() + timedelta(seconds=seconds)
        if not self._warned_late and self._ends_before(done) and self.expires:
            self._warned_late = True
            hours = math.ceil((done - self.expires).total_seconds() / 3600 + _MARGIN_H)
            self._warn(
                f"the job would end at about {spoken_day(done, self.now().date())}, after that",
                hours,
            )

    def tick(self) -> None:
        """Print a warning if one is due."""
        if not self._warned_soon and self._ends_before(self.now() + _SOON):
            self._warned_soon = True
            lost = "the job and its files end with them"
            stored = f"the job ends with them; what it has written is in {self.stored}"
            self._warn(stored if self.stored else lost, 2)

    def explain(self, job: str, why: str) -> JobError | None:
        """Return the error for a job that the deadline ended; ``None`` if it was something else."""
        over = self._ends_before(self.now())
        return explain_expiry(job, self.expires, self.now(), self.flags, why) if over else None

    def _ends_before(self, time: datetime) -> bool:
        if self.expires and self.expires <= time:
            self.expires = self.find() or self.expires
        return self.expires is not None and self.expires <= time

    def _warn(self, why: str, hours: int) -> None:
        assert self.expires
        self.show(
            f"warning: the nodes shut down at {spoken_time(self.expires, self.now())}; {why}\n"
            f"  to keep them longer: spr-cluster extend {hours}h {self.flags}"
        )


def list_jobs(head: Host) -> tuple[JobSummary, ...]:
    """Return the jobs on a head, in the order of submission."""
    program = send(listing).render("listing the jobs")
    return parse_jobs(head.run(program).stdout)


def parse_jobs(text: str) -> tuple[JobSummary, ...]:
    """Return the jobs in the output of :mod:`jobs.worker.supervisor.listing`."""
    known = TypeAdapter(JobSummary)
    found = []
    for line in text.splitlines():
        # Other lines are, for example, a login banner's.
        with suppress(UsageError, ValueError, LookupError, TypeError, AttributeError):
            row = parse_object(line, "job")
            if NAME.fullmatch(row["job"]):
                found.append(known.validate_python(_merge(row)))
    return tuple(sorted(found, key=lambda job: (job.submitted, job.job)))


def _merge(row: dict[str, Any]) -> dict[str, Any]:
    """Return a job's values; those recorded at its end override those from its start."""
    # While the job runs, its end may be the work of its program.
    is_running = row["queue"] and row["queue"][0] == "RUNNING"
    end = row["end"] if parse_end(row["end"]) and not is_running else {}
    state, reason = _state(row, end)
    ends = row.get("expected_end") if state == RUNNING else None
    known = {**row["begin"], **end, **row}
    # The files of a job that will run again are still to come.
    lost = row.get("on_lost_head", False) and state not in ACTIVE
    changes = {"state": state, "waits_for": reason, "expected_end": ends, "on_lost_head": lost}
    if lost and not row.get("checkpoint"):
        changes["unfinished"] = False  # to be resumed from its bucket, if it has one
    return {**known, **changes}


def _state(row: dict[str, Any], end: dict[str, Any]) -> tuple[str, str]:
    """Return the job's state and why it is waiting."""
    if end:
        return end["state"], ""
    if row["queue"]:
        slurm, reason, _ = row["queue"]
        if slurm != PENDING:
            return RUNNING, ""
        return (REQUEUED if row["begin"] else QUEUED), reason
    if row["queue"] is None:  # Slurm does not answer
        return (RUNNING if row["begin"] else QUEUED), "Slurm does not answer"
    if row["cancelled"]:
        return CANCELLED, ""
    return (SUBMITTING if row.get("coming") else LOST), ""


def read_log(
    head: Host, job: JobSummary, on_text: TextSink, rank: int | None = None, *, follow: bool = False
) -> None:
    """Stream the log of a job or of one rank, in whole lines; with ``follow``, until the job ends.

    Raises :class:`UsageError` if the job has no such rank, or no log yet.
    """
    paths = JobPaths(job.job)
    name = "log" if rank is None else f"{STATE}/{LOGS}/rank-{rank}.log"
    what = (paths.root, name, job.job if follow and job.is_active else "", "1", "")
    node = "" if rank is None else find_node(job, rank)
    if rank is None:  # of a resumed job
        earlier = f"cat {paths.root}/log.earlier 2>/dev/null || true"
        script = f"# reading the log of earlier runs\n{earlier}"
        head.run(script, timeout_s=None, on_text=on_text)
    program = send(log_reader, *what).render("reading a log", node)
    head.run(program, timeout_s=None, on_text=on_text)


def read_element(head: Host, job: JobSummary, on_text: TextSink, number: int) -> None:
    """Print the log of an array's element or a study's trial, from a node that has it.

    Raises :class:`UsageError` if none has.
    """
    logs = f"{STATE}/{LOGS}"
    names = f"{logs}/element-{number}.log {logs}/trial-{number}.log {ELEMENTS}/{number}/{LOG}"
    find = f"cd {JobPaths(job.job).root} && for f in {names}; do [ ! -e $f ] || exec cat $f; done; exit 3"
    for node in job.nodes:
        ssh = shlex.join(["ssh", "-n", "-o", "ConnectTimeout=10", node, find])
        script = f"# reading a log of one element\n{ssh}"
        if head.run(script, timeout_s=None, on_text=on_text, check=False).exit_code == 0:
            return
    raise UsageError(f"--element {number}: job {job.job} has no such element or trial with a log")


def find_node(job: JobSummary, rank: int) -> str:
    """Return the name of a rank's node. Raises :class:`UsageError`."""
    if not job.nodes or not job.ranks_per_node:
        raise UsageError(f"job {job.job} has not started yet: it is {job.state}")
    if not 0 <= rank < job.ranks_per_node * len(job.nodes):
        last = job.ranks_per_node * len(job.nodes) - 1
        raise UsageError(f"--rank {rank}: job {job.job} has the ranks 0 to {last}")
    return job.nodes[rank // job.ranks_per_node]
