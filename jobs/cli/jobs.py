"""``spr-cluster jobs`` and ``cancel``."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.console.display import format_seconds, format_table, make_progress
from cluster.console.options import switch
from cluster.console.output import emit, wrap
from cluster.console.parser import Parser, add_request
from cluster.local_files import utc_now
from cluster.slurm.job_queue import describe_reason
from infra.aws.cloud import cloud_flag
from infra.errors import NoClusterError, UsageError
from infra.s3_url import parse_s3_url
from infra.words import counted, spoken_time
from jobs.cli.shared.chosen_job import (
    JobRequest,
    is_stored,
    job_argument,
    look_in_bucket,
    open_launcher,
    open_s3,
    parse_job_or_url,
)
from jobs.cli.shared.job_display import JobDisplay
from jobs.places.bucket import fetch_records, list_stored
from jobs.places.launcher import (
    LOST,
    QUEUED,
    REQUEUED,
    RUNNING,
    JobSummary,
    choose_active,
    choose_job,
)
from jobs.places.plan import JobPaths
from jobs.places.queue.launcher import QueueLauncher
from jobs.report.history import GROUPS, read_costs, sum_by
from jobs.report.receipt import read_receipt
from jobs.train.train import resume_command, task_of
from jobs.worker.storage.ownership import describe
from jobs.worker.supervisor.attempt import FAILED

_NEWEST = 10


@dataclass(frozen=True, kw_only=True)
class JobsRequest(JobRequest):
    """List the jobs on a cluster, oldest first, or show one. A job is submitting, queued, running,
    succeeded, failed (with its exit code), cancelled, requeued (it lost a rank or node, and will run
    again), or lost (it left the queue and nothing says how it ended, for example because the head was
    shut down). A job with a checkpoint and without a model can be resumed:
    `spr-cluster train squad --resume JOB`. With s3://BUCKET/PREFIX, list the jobs stored there; no
    cluster is needed.

    examples:
      spr-cluster jobs
      spr-cluster jobs --name bert --json
      spr-cluster jobs squad-20261122-142501-k3f
      spr-cluster jobs s3://my-results
      spr-cluster jobs --cost
    """

    job: str | None = job_argument(
        "show only this one, or those in s3://BUCKET/PREFIX", parse_job_or_url
    )
    all: bool = switch(f"list all jobs, not only the newest {_NEWEST}")
    cost: bool = switch(
        "what ended jobs have cost, by month, owner, cluster, and tag: those in ./results, or in s3://BUCKET"
    )


@dataclass(frozen=True, kw_only=True)
class CancelRequest(JobRequest):
    """End a job on all nodes, or remove it from the queue. A training job saves a checkpoint first.
    What is left after two minutes (or three times its last checkpoint's duration; other jobs: ten
    seconds), or after Ctrl-C, is killed, even if nodes are gone. If there is no job, nothing happens.

    examples:
      spr-cluster cancel
      spr-cluster cancel --now                       do not wait for a checkpoint
      spr-cluster cancel --all
      spr-cluster cancel squad-20260731-142501-k3f --name bert
    """

    all: bool = switch("end all queued and running jobs")
    now: bool = switch("kill it without waiting")


def add_parser(parent: Parser) -> None:
    add_request(parent, "jobs", run_jobs, JobsRequest)
    add_request(parent, "cancel", run_cancel, CancelRequest)


def run_jobs(request: JobsRequest) -> int:
    if request.cost:
        return _list_costs(request)
    if is_stored(request.job):
        return _list_stored(request)
    if request.job and request.all:
        raise UsageError("JOB and --all can't be used together")
    try:
        launcher, now = open_launcher(request), utc_now()
    except NoClusterError as error:
        return _list_stored(look_in_bucket(request, error))
    found = launcher.list_jobs()
    if request.job:
        job = choose_job(found, request.job, launcher.place)
        folder, (rows, receipt) = JobPaths(job.job).root, _find_receipt(job)
        ends = launcher.expires, launcher.job_ends
        result = {**launcher.where, **_as_dict(job, now), "folder": folder, **receipt}
        where = "were on a head that is gone" if job.on_lost_head else f"are in {folder} on node0"
        text = f"{render([job], now, *ends)}\nits files {where}{rows}"
    else:
        result = {**launcher.where, "jobs": [_as_dict(job, now) for job in found]}
        text = _render_list(launcher, found, now, every=request.all)
    emit(request, wrap(text), result)
    return 0


def _list_costs(request: JobsRequest) -> int:
    """Add up ended jobs from their results, here or in a bucket; no cluster is needed."""
    if request.all or (request.job and not is_stored(request.job)):
        raise UsageError("--cost adds up all jobs in ./results or s3://BUCKET: omit JOB and --all")
    if request.job:
        place, progress = parse_s3_url(request.job, "jobs"), make_progress()
        with progress.phase(f"Read {place}"), tempfile.TemporaryDirectory() as folder:
            fetch_records(open_s3(request, progress), place, Path(folder))
            found, uncounted = read_costs(Path(folder))
        where, empty = str(place), f"No ended jobs in {place}."
    else:
        found, uncounted = read_costs(Path("results"))
        where, empty = "./results", "No ended jobs in ./results: `fetch` brings them there."
    sums = {group: sum_by(found, group) for group in GROUPS}
    rows = [
        (f"{group} {name}", str(one["jobs"]), f"{one['node_hours']:.1f}", _price(one))
        for group, by_name in sums.items()
        for name, one in by_name.items()
    ]
    table = format_table(
        [("", "JOBS", "NODE HOURS", "COST"), *rows], ("JOBS", "NODE HOURS", "COST")
    )
    lines = [table if found else empty]
    if unknown := sum(each.usd is None for each in found):
        lines.append(
            f"{counted(unknown, 'job')} without a known price, such as on the embedded cloud"
        )
    if uncounted:
        jobs = f"{counted(len(uncounted), 'job')} in {where}"
        lines.append(f"not counted, because the end is unknown: {jobs}: {describe(uncounted)}")
    result = {"jobs": [asdict(each) for each in found], "uncounted": uncounted, **sums}
    emit(request, wrap("\n".join(lines)), result)
    return 0


def _price(one: Mapping[str, Any]) -> str:
    if one["usd"] is None:
        return "-"
    without = f" without {counted(one['unpriced'], 'job')}" if one["unpriced"] else ""
    return f"${one['usd']:,.2f}{without}"


def _find_receipt(job: JobSummary) -> tuple[str, dict[str, object]]:
    """Return an ended job's receipt as text and for ``--json``, if its results are in ./results."""
    known = read_receipt(Path("results", job.job)) if job.ended else None
    if known is None:
        return "", {}
    _, receipt = known
    rows = format_table([("", "TIME", "COST"), *receipt.rows()], ("TIME", "COST"))
    return f"\n\n{rows}", {"receipt": receipt.as_dict()}


def _as_dict(job: JobSummary, now: datetime) -> dict[str, object]:
    return {**job.as_dict(), **job.spending(now).as_dict()}


def _list_stored(request: JobsRequest) -> int:
    """List the jobs in a bucket; no cluster is needed."""
    place, progress = parse_s3_url(request.job or "", "jobs"), make_progress()
    with progress.phase(f"List {place}"):
        found = list_stored(open_s3(request, progress), place, request.name or "")
    of = f" of cluster {request.name}" if request.name else ""
    shown = found if request.all else newest(found)
    result: dict[str, object] = {"place": str(place), "jobs": [job.as_dict() for job in found]}
    lines = [render(shown, utc_now()) if found else f"No jobs{of} in {place}."]
    if hidden := len(found) - len(shown):
        lines.append(f"{counted(hidden, 'earlier job')}: --all")
    if any(job.state == RUNNING for job in found):
        lines.append("running: the end is not in the bucket; the nodes may be gone")
    if found:
        last, is_one = found[-1].job, place.prefix.rpartition("/")[2] == found[-1].job
        words = ["spr-cluster", "fetch", str(place if is_one else place.below(last))]
        get = f"{shlex.join(words)}{cloud_flag(request.cloud)}"
        lines.append(f"To get the results of one: {get}")
        rows, receipt = _find_receipt(found[-1]) if is_one else ("", {})
        lines.append(rows.removeprefix("\n"))
        result |= {**found[-1].as_dict(), **receipt} if is_one else {}
    emit(request, wrap("\n".join(lines).rstrip()), result)
    return 0


def _render_list(
    launcher: QueueLauncher, found: Sequence[JobSummary], now: datetime, *, every: bool
) -> str:
    if not found:
        return f"No jobs {launcher.place}. `spr-cluster train squad {launcher.flags}` starts one."
    shown = found if every else newest(found)
    lines = [render(shown, now, launcher.expires, launcher.job_ends)]
    if hidden := len(found) - len(shown):
        lines.append(f"{counted(hidden, 'earlier job')}: --all")
    if launcher.outlook and any(job.is_active for job in found):
        lines.append(launcher.outlook)
    return "\n".join(lines)


def newest(found: Sequence[JobSummary]) -> Sequence[JobSummary]:
    """Return the active jobs and the newest ended ones."""
    return [job for job in found if job.is_active or job in found[-_NEWEST:]]


def render(
    found: Sequence[JobSummary],
    now: datetime,
    expires: datetime | None = None,
    job_ends: datetime | None = None,
) -> str:
    """Render the jobs as a table, followed by the causes of failures and the expected ends.

    ``job_ends`` is when the nodes of a job with a limit shut down.
    """
    lines = [_table(found, now)]
    for job in found:
        cost = job.spending(now).describe() if job.state == RUNNING or len(found) == 1 else ""
        end = (job_ends if job.max_time_s else None) or expires
        if text := "; ".join(filter(None, (_describe(job, now, end), cost))):
            lines.append(f"{job.job}: {text}")
    return "\n".join(lines)


def _table(found: Sequence[JobSummary], now: datetime) -> str:
    header: tuple[str, ...] = ("JOB", "OWNER", "STATE", "NODES", "BEGAN", "TOOK")
    header += ("ON DISK", "MODEL", "CHECKPOINT", "ELEMENTS")
    rows = [header, *(_row(job, now) for job in found)]
    if not any(job.owner for job in found):
        rows = [(row[0], *row[2:]) for row in rows]
    if not any(job.progress for job in found):
        rows = [row[:-1] for row in rows]
    return format_table(rows, ("ON DISK", "NODES", "TOOK"))


def _row(job: JobSummary, now: datetime) -> tuple[str, ...]:
    ended = job.ended or (now if job.state == RUNNING else None)
    took = (ended - job.began).total_seconds() if ended and job.began else None
    return (
        job.job,
        job.owner or "-",
        job.state if job.exit_code is None or job.state != FAILED else f"failed ({job.exit_code})",
        f"{len(job.nodes) or '-'}" + (f" × {counted(job.cores, 'core')}" if job.cores else ""),
        f"{format_seconds(max(0.0, (now - job.began).total_seconds()))} ago" if job.began else "-",
        "-" if took is None else format_seconds(max(0.0, took)),
        "-" if job.size_kib is None else f"{job.size_kib / 1024:,.1f} MiB",
        "yes" if job.has_model else "-",
        job.checkpoint or "-",
        job.progress or "-",
    )


def _describe(job: JobSummary, now: datetime, expires: datetime | None) -> str:
    """Return why a job failed or is waiting, or when it ends; "" for other jobs."""
    if job.state in (QUEUED, REQUEUED) and job.waits_for:
        return f"waits: {describe_reason(job.waits_for)}"
    if job.expected_end:
        late = expires and job.expected_end > expires
        when = f"its last step is expected at {spoken_time(job.expected_end, now)}"
        return f"{when}, after its nodes shut down" if late else when
    return job.cause if job.state == FAILED else ""


def run_cancel(request: CancelRequest) -> int:
    progress = make_progress()
    launcher = open_launcher(request, progress)
    chosen = choose_active(launcher.list_jobs(), request.job, launcher.place, every=request.all)
    results: list[dict[str, object]] = []
    # Waiting jobs first: they would start on the others' nodes.
    ordered = sorted(chosen, key=lambda job: job.state == RUNNING)
    for found in (*ordered,) or (None,):
        now, silent = found, tuple[str, ...]()
        ends = found is not None and (found.is_active or found.state == LOST)
        if found and ends:
            with progress.phase(f"End {found.job}"):
                silent = launcher.cancel(found, JobDisplay(progress).log, now=request.now)
            now = next((job for job in launcher.list_jobs() if job.job == found.job), found)
        result = {**launcher.where, "cancelled": ends, "unreachable": silent}
        results.append({**result, **(now.as_dict() if now else {"job": None})})
        if not request.json:
            print(_render_cancel(now, launcher, ended=ends))
    ended = [each for each in results if each["job"] is not None]
    emit(request, "", {"jobs": ended} if request.all else results[0])
    return 0


def _render_cancel(found: JobSummary | None, launcher: QueueLauncher, *, ended: bool) -> str:
    """Describe in one or two lines what was done and how to resume the job."""
    if found is None:
        return f"No job is running or queued {launcher.place}."
    if not ended:
        return f"Job {found.job} has ended already: it is {found.state}."
    lines = [f"Job {found.job} has ended."]
    if found.unfinished and found.checkpoint:
        resume = f"{shlex.join(resume_command(task_of(found.job)))} {found.job} {launcher.flags}"
        lines.append(f"Checkpoint {found.checkpoint} is saved. To resume: {resume}")
    elif found.unfinished:
        lines.append("It had no checkpoint yet, so there is nothing to resume.")
    return "\n".join(lines)
