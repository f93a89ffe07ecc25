"""``spr-cluster fetch``, and the option ``--push-to``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.console.display import make_progress
from cluster.console.options import Request, option, switch
from cluster.console.output import emit, say
from cluster.console.parser import Parser, add_request
from infra.aws.cloud import cloud_flag
from infra.aws.s3 import check_s3_location, connect_s3, push_folder
from infra.errors import JobError, SprError, UsageError
from infra.s3_url import S3Location, parse_s3_url
from infra.wait import Progress
from infra.words import counted
from jobs.cli.shared.chosen_job import (
    JobRequest,
    choose_results,
    is_stored,
    job_argument,
    look_in_bucket,
    open_launcher,
    open_s3,
    parse_job_or_url,
)
from jobs.cli.shared.job_options import ResultsRequest
from jobs.places.bucket import fetch_stored, find_stored
from jobs.places.launcher import RUNNING, Outcome, choose_job, require_files
from jobs.report.receipt import add_receipt
from jobs.train.request import check_writable, expand_home
from jobs.train.resume import parse_stored_job
from jobs.worker.training.options import HUB

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

# results.json is uploaded last: its presence means that the upload is complete.
_BESIDE_MODEL = ("job/log", "job/job.json", "predictions.json", "null_odds.json", "results.json")


@dataclass(frozen=True, kw_only=True)
class JobResultsRequest(JobRequest, ResultsRequest):
    """A request for a job's results."""

    all_checkpoints: bool = False


@dataclass(frozen=True, kw_only=True)
class PushRequest(Request):
    """A request that can store a model in S3."""

    push_to: str | None = option(
        "also store the model in S3, in a folder named after the job, with this machine's AWS "
        "credentials",
        metavar="s3://BUCKET/PREFIX",
    )


@dataclass(frozen=True, kw_only=True)
class FetchRequest(JobResultsRequest, PushRequest):
    """Download what a job wrote, its log, and its metrics from a cluster's nodes, for example of a
    job that was started on another machine. `spr-cluster jobs` lists the jobs. By its URL in the
    bucket of a cluster (`up --bucket`), a job can be fetched when the cluster is gone;
    `--cloud local` looks in the embedded cloud.

    examples:
      spr-cluster fetch                            the newest job
      spr-cluster fetch squad-20260731-142501-k3f --results ./best
      spr-cluster fetch --push-to s3://my-models/squad
      spr-cluster fetch s3://my-results/squad-20260731-142501-k3f
    """

    job: str | None = job_argument(
        "job ID, or its URL, s3://BUCKET/PREFIX/JOB (default: the newest)", parse_job_or_url
    )
    all_checkpoints: bool = switch(
        "also fetch the checkpoints of transformers' Trainer that are neither the newest nor the best"
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "fetch", run, FetchRequest)


def open_push_target(push_to: str | None) -> tuple[S3Client, S3Location] | None:
    """Return the location of ``--push-to``. Raises :class:`UsageError` if it can't be written."""
    if push_to is None:
        return None
    if push_to.startswith(HUB):
        raise UsageError(
            f"--push-to {push_to}: only `train` sends a model to the hub, from the nodes",
            hint=f"hf upload {push_to.removeprefix(HUB)} results/JOB/model --private",
        )
    location = parse_s3_url(push_to)
    s3 = connect_s3()
    check_s3_location(s3, location)
    return s3, location


def push(
    target: tuple[S3Client, S3Location] | None,
    results: Path,
    job: str,
    progress: Progress,
    flags: str,
) -> str | None:
    """Store the results at the location of :func:`open_push_target`, and return it.

    ``flags`` name the cluster in the message of a failure.
    """
    if target is None:
        return None
    s3, location = target
    place, files = location.below(job), files_to_push(results)
    try:
        with progress.phase(f"Push {counted(len(files), 'file')} to {place}"):
            push_folder(s3, files, place, about={"spr-cluster-job": job}, on_file=progress.note)
    except SprError as error:
        again = f"to try again: spr-cluster fetch {job} {flags} --push-to {location}"
        raise JobError(
            f"the results are in {results}/, but were not stored in S3: {error.message}",
            hint=f"{error.hint}\n  → {again}" if error.hint else again,
        ) from error
    return str(place)


def files_to_push(results: Path) -> Mapping[str, Path]:
    """Return the model and the small files beside it, by name. Raises :class:`JobError` without a model."""
    paths = [path for path in sorted((results / "model").rglob("*")) if path.is_file()]
    if not paths:
        raise JobError(
            f"{results} has no model to push", hint="`spr-cluster jobs` shows how the job ended"
        )
    paths += [results / name for name in _BESIDE_MODEL if (results / name).is_file()]
    return {path.relative_to(results).as_posix(): path for path in paths}


def run(request: FetchRequest) -> int:
    if request.results:
        check_writable(expand_home(request.results))
    if is_stored(request.job):
        return _fetch_stored(request)
    target = open_push_target(request.push_to)
    progress = make_progress()
    try:
        launcher = open_launcher(request, progress)
        found = choose_job(launcher.list_jobs(), request.job, launcher.place)
        require_files(found, launcher.flags)
    except SprError as error:
        return _fetch_stored(look_in_bucket(request, error, one=True))
    if target and not found.has_model:
        raise UsageError(
            f"--push-to stores a model, but job {found.job} ({found.state}) has none",
            hint=f"to fetch what it has: spr-cluster fetch {found.job} {launcher.flags}",
        )
    if found.state == RUNNING:
        say(f"{found.job} is still running; fetching its output so far")
    results = choose_results(request.results, found.job)
    with progress.phase(f"Fetch {found.job}"):
        choice = {"all_checkpoints": request.all_checkpoints}
        fetched = launcher.fetch(found.job, results, progress.note, **choice)
    for line in (*fetched.said, *fetched.missing):
        say(line)
    add_receipt(results)
    pushed = push(target, results, found.job, progress, launcher.flags)
    text = f"{found.job} ({found.state}): {results}/" + (f"\n{pushed}" if pushed else "")
    emit(request, text, {**found.as_dict(), "results": str(results), "pushed_to": pushed})
    return 0


def _fetch_stored(request: FetchRequest) -> int:
    for flag, given in {"--name": request.name, "--push-to": request.push_to}.items():
        if given:
            raise UsageError(f"{flag}: the job is read from {request.job}: omit it")
    fetch_from_bucket(request, Outcome())
    return 0


def fetch_from_bucket(request: JobResultsRequest, outcome: Outcome) -> None:
    """Fetch a job by its URL in S3, and set its outcome; no cluster is needed."""
    bucket, job = parse_stored_job(request.job or "", "fetch")
    place, progress = bucket.below(job), make_progress()
    results = choose_results(request.results, job)
    s3 = open_s3(request, progress)
    found, sizes = find_stored(s3, place, job, cloud_flag(request.cloud))
    if found.state == RUNNING:
        say(f"{job} has not ended, as far as {place} says; fetching its output so far")
    with progress.phase(f"Fetch {job}"):
        choice = {"all_checkpoints": request.all_checkpoints}
        fetched = fetch_stored(s3, place, sizes, results, progress.note, **choice)
    for line in fetched.said:
        say(line)
    add_receipt(results)
    known: dict[str, Any] = {**found.as_dict(), "results": str(results), "pushed_to": None}
    emit(request, f"{job} ({found.state}): {results}/", known)
    outcome.job, outcome.state, outcome.results = job, found.state, results
    outcome.is_home = found.state != RUNNING
