"""``spr-cluster attach`` and ``wait``: follow a job until it ends, with or without its output."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timezone

from cluster.cli.chosen_cluster import choose_cluster
from cluster.console.display import make_progress
from cluster.console.options import option, positive_int, switch
from cluster.console.output import emit, say
from cluster.console.parser import Parser, add_request
from infra.errors import DeadlineError, JobError, NoClusterError, SprError, UsageError
from infra.wait import Progress, wait_until
from infra.words import spoken_duration
from jobs.cli.results.fetch import JobResultsRequest, fetch_from_bucket
from jobs.cli.shared.chosen_job import (
    JobRequest,
    choose_results,
    look_in_bucket,
    open_job_context,
    open_launcher,
)
from jobs.cli.shared.job_display import render_end
from jobs.cli.shared.when_done import EndRequest, OnCluster, follow_to_end, run_command
from jobs.places.launcher import (
    LOST,
    JobSummary,
    LostFilesError,
    Outcome,
    choose_active,
    require_files,
)
from jobs.places.queue.history import list_jobs
from jobs.places.queue.launcher import QueueLauncher
from jobs.places.queue.session import attach
from jobs.places.queue.slurm import END_S
from jobs.places.record import claim_results, read_results
from jobs.worker.supervisor.attempt import SUCCEEDED

_WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class AttachRequest(JobResultsRequest, EndRequest):
    """Follow a job from the beginning of its log, from any machine that has the cluster's key, and
    fetch its results when it ends. Ctrl-C ends only this command.

    examples:
      spr-cluster attach
      spr-cluster attach squad-20260731-142501-k3f --name bert
    """


@dataclass(frozen=True, kw_only=True)
class WaitRequest(JobRequest):
    """Wait until a job ends, without showing its output. If none is queued or running, the newest one
    counts. The exit code is 0 if it succeeded, else 1, also if it still runs after --timeout.

    examples:
      spr-cluster wait squad-20260731-142501-k3f
      spr-cluster wait --all && spr-cluster down --yes --name spr
      spr-cluster wait --timeout 3600
    """

    all: bool = switch("wait for all queued and running jobs")
    timeout: int = option(
        "give up after this time; the job continues (default: a week)",
        _WEEK_S,
        parse=positive_int,
        metavar="SECONDS",
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "attach", run_attach, AttachRequest)
    add_request(parent, "wait", run_wait, WaitRequest)


def run_attach(request: AttachRequest) -> int:
    return follow_to_end(request, lambda on_cluster: _attach(request, on_cluster))


def _attach(request: AttachRequest, on_cluster: OnCluster) -> int:
    now, outcome = datetime.now(timezone.utc), Outcome()
    try:
        context = open_job_context(request, now, show_cost=True, on_cluster=on_cluster)
        outcome, place = context.outcome, f"on cluster {context.cluster.name}"
        listed = list_jobs(context.open_host(context.cluster.head))
        found = next(iter(choose_active(listed, request.job, place)), None)
        if found:
            require_files(found, context.cluster.flags)
    except (NoClusterError, LostFilesError) as error:
        fetch_from_bucket(look_in_bucket(request, error, one=True), outcome)
        if isinstance(error, LostFilesError):
            return 0
        # There is no cluster, so nothing is removed, and the command runs here.
        name = choose_cluster(request, tell=lambda _: None)
        if request.down_when_done:
            given = {"name": name, "cloud": request.cloud, "region": request.region}
            flags = (f"--{option} {value}" for option, value in given.items() if value)
            down = f"spr-cluster down {' '.join(flags)}"
            say(f"--down-when-done: no nodes run; to remove what is left of the cluster: {down}")
        if not request.on_finish:
            return 0
        if not outcome.is_home:
            raise JobError(f"--on-finish was not run: {outcome.job} has not ended") from None
        return run_command(request, outcome, name)
    if found is None:
        raise UsageError(
            f"no job is running or queued {place}",
            hint="`spr-cluster jobs` lists the earlier ones, `spr-cluster fetch JOB` downloads one",
        )
    results = choose_results(request.results, found.job)
    claim_results(results, found.job)
    end = attach(context, found, results)

    emit(
        request,
        lambda: render_end(found.job, end, read_results(results), results),
        {"job": found.job, **end.as_dict(), "results": str(results)},
    )
    return 0


def run_wait(request: WaitRequest) -> int:
    progress, begun = make_progress(), time.monotonic()
    launcher = open_launcher(request, progress)
    listed = launcher.list_jobs()
    chosen = choose_active(listed, request.job, launcher.place, every=request.all)
    # Otherwise `run --detach … && wait && …` would continue after a job that failed quickly.
    chosen = chosen or ([] if request.all else [*listed[-1:]])
    done = [_wait_for(launcher, job, request.timeout, begun, progress) for job in chosen]
    rows = [job.as_dict() for job in done]
    lines = [
        f"Job {job.job} succeeded. To download its results: spr-cluster fetch {job.job} {launcher.flags}"
        for job in done
        if job.state == SUCCEEDED
    ]
    text = "\n".join(lines) if chosen else "No job is running or queued."
    emit(request, text, {"jobs": rows} if request.all else rows[0] if rows else {"job": None})
    failed = [job for job in done if job.state != SUCCEEDED]
    if failed:
        raise JobError(
            "; ".join(
                f"job {j.job} is {j.state}{f': {j.cause}' if j.cause else ''}" for j in failed
            ),
            hint=f"its log: spr-cluster logs {failed[0].job} {launcher.flags}",
        )
    return 0


def _wait_for(
    launcher: QueueLauncher, chosen: JobSummary, timeout_s: int, begun: float, progress: Progress
) -> JobSummary:
    """Wait for a job until ``timeout_s`` seconds after the beginning of the command."""
    job, left_s = chosen.job, timeout_s - (time.monotonic() - begun)
    lost_at = list[float]()

    def ended() -> JobSummary | None:
        nonlocal chosen
        try:
            found = {each.job: each for each in launcher.list_jobs()}
        except UsageError:
            raise
        except SprError as error:
            if over := launcher.explain_loss(chosen, error):
                raise over from None
            progress.note(f"{error.message}; reconnecting")
            return None
        if job not in found:
            raise JobError(f"job {job} was deleted before it ended")
        progress.note(found[job].state)
        # The keeper of its cluster records the end of a killed job soon.
        if found[job].state == LOST:
            lost_at.append(time.monotonic())
            return found[job] if time.monotonic() - lost_at[0] > END_S else None
        if not found[job].is_active:
            return found[job]
        chosen = found[job]
        return None

    with progress.phase(f"Wait for {job}"):
        try:
            return wait_until(f"job {job}", ended, deadline_s=left_s, every_s=5)
        except DeadlineError:
            text = f"job {job} is still {chosen.state} after {spoken_duration(timeout_s)}; it continues"
            follow, end = (
                f"spr-cluster {verb} {job} {launcher.flags}" for verb in ("attach", "cancel")
            )
            raise DeadlineError(text, hint=f"to follow it: {follow}; to end it: {end}") from None
