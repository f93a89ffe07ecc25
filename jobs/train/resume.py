"""``train squad --resume``: continue an interrupted job from its last checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.errors import JobError, UsageError
from infra.s3_url import S3Location, parse_s3_url
from infra.words import counted, format_size
from jobs.places.files import restore_files
from jobs.places.launcher import NAME, JobEnd, JobSummary, choose_job, parse_end
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.history import list_jobs
from jobs.places.queue.session import JobContext, JobSession, run_job
from jobs.places.record import JobRecord, read_record
from jobs.train.request import change_options, check_results, require_able_stack, spec_of
from jobs.train.study import job_packages
from jobs.train.trackers import find_hub_token, tracker_variables
from jobs.train.train import plan_options, read_results
from jobs.worker.runtime.checkpoint_names import step_of
from jobs.worker.spec import JobSpec, Recovery, Resources
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import MAY_CHANGE, TrainOptions, flag

# The record is the first run's: a resumed run may have other epochs.
_FIRST_TOTAL = """# reading how many steps a job has
cd {root} || exit
cat log.earlier log 2>/dev/null | grep -om 1 '"total": [0-9]*' | grep -o '[0-9]*' || true
"""


@dataclass(frozen=True)
class ResumeRequest:
    """The job of a task to resume; ``None`` for the last unfinished one.

    ``results`` defaults to ``results/JOB``. ``changes`` are options, by name, that differ from before.
    """

    task: str
    job: str | None
    results: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    spec: JobSpec = field(default_factory=JobSpec)
    """The choices of the resumed run; its work and its number of nodes are the job's."""
    env: tuple[str, ...] = ()
    """``NAME=VALUE`` words for the ranks; those of the interrupted job are gone."""
    bucket: S3Location | None = None
    """Where the job's folder is stored, if it comes from there."""
    retries: int | None = None
    """How often it may restart, if not as often as before."""


def parse_stored_job(url: str, flag: str) -> tuple[S3Location, str]:
    """Return the place and the ID of a job stored in S3, ``s3://BUCKET/PREFIX/JOB``.

    Raises :class:`UsageError` for anything else.
    """
    place = parse_s3_url(url, flag)
    prefix, _, job = place.prefix.rpartition("/")
    if not NAME.fullmatch(job):
        raise UsageError(
            f"{flag} {url}: expected a job's folder, such as "
            f"s3://{place.bucket}/squad-20260731-142501-k3f"
        )
    return S3Location(place.bucket, prefix), job


def resume(context: JobContext, request: ResumeRequest) -> tuple[dict[str, Any], Path]:
    """Continue a job; return the content of its ``results.json`` and the folder of that file.

    Raises :class:`UsageError` if the job can't be resumed, :class:`JobError` if it fails.
    """
    require_able_stack(context.stack, f"train {request.task}")
    done = run_job(context, lambda session: _plan_resumed(session, request))
    return read_results(done), done.plan.results or Path()


def _plan_resumed(session: JobSession, request: ResumeRequest) -> JobPlan:
    cluster, log = session.context.cluster, session.context.on_log
    ended = request.bucket and _restore(session, request.bucket, request.job or "")
    found = choose_unfinished(list_jobs(session.head), request.task, request.job, cluster.name)
    paths = JobPaths(found.job)
    results = request.results or Path("results", found.job)
    check_results(results, found.job)
    record = read_record(session.head, paths)
    report_to = options_again(record, request).report_to
    words = with_login(record, request.env, log)
    request = replace(request, env=tracker_variables(report_to, words))
    plan = plan_again(record, request, len(cluster.nodes), found.job)
    used = plan.spec.resources.nodes or 0
    if used < len(cluster.nodes):
        log(f"using {counted(used, 'node')} of {len(cluster.nodes)}")
    if plan.planned_nodes:
        log(describe_fewer(record, plan))
    if found.checkpoint and {"epochs", "max_steps"} & request.changes.keys():
        said = session.head.run(_FIRST_TOTAL.format(root=paths.root)).stdout
        step = step_of(found.checkpoint)
        require_steps_left(step, said, record, options_again(record, request))
    given = {word.partition("=")[0] for word in request.env}
    if missing := {*record.more.get("env", ())} - given:
        names = ", ".join(sorted(missing))
        log(f"warning: the job had {names}: give it again with --env if needed")
    log(f"job {found.job} resumes from {found.checkpoint or 'the beginning'}")
    spec = keep_choices(plan.spec, request, record, found)
    details = {**plan.details, "spent": add_spent(record, ended or found, log)}
    return replace(plan, results=results, spec=spec, details=details)


def keep_choices(
    spec: JobSpec, request: ResumeRequest, record: JobRecord, found: JobSummary
) -> JobSpec:
    """Return the job's own limits, restarts, and bucket, unless the request has others. Pure."""
    limit = record.more.get("limit") or {"max_time_s": 0.0, "budget": 0.0}
    asked, before = spec.ending, record.more.get("recovery", {})
    retries = before.get("retries", spec.recovery.retries)
    bucket = record.bucket if spec.storage.bucket is None else spec.storage.bucket
    return replace(
        spec,
        storage=replace(spec.storage, bucket=bucket),
        recovery=Recovery(
            retries if request.retries is None else request.retries,
            min(before.get("least_nodes", 0), spec.resources.nodes or 0),
            found.job,
        ),
        ending=replace(
            asked,
            max_time_s=asked.max_time_s or limit["max_time_s"],
            budget=asked.budget or limit["budget"],
        ),
    )


def add_spent(record: JobRecord, end: JobEnd, log: Callable[[str], None]) -> dict[str, float]:
    """Return what all runs of a job took of its limits, with the one that ended so.

    After the cluster's time to live, a job with a limit keeps all nodes, and pays for them.
    """
    spent, limit = record.more.get("spent", {"seconds": 0.0, "usd": 0.0}), record.more.get("limit")
    seconds = (end.seconds or 0.0) + end.earlier_s
    # The bucket may still have the end of the run before.
    is_known = bool(end.ended and end.ended >= datetime.fromisoformat(record.when))
    if not is_known:
        seconds = 0.0
        if limit:
            log("warning: the end of the last run is unknown, so the limits do not count it")
    usd_per_hour, over, nodes = record.usd_per_hour or 0.0, math.inf, 0
    if limit:
        usd_per_hour = limit["usd_per_hour"] or usd_per_hour
        over, nodes = limit["alone"]["from"], limit["alone"]["nodes"]
    node_s = end.node_s(record.node_share, over, nodes) if is_known else 0.0
    usd = usd_per_hour * node_s / 3600
    return {"seconds": spent["seconds"] + seconds, "usd": spent["usd"] + usd}


def with_login(
    record: JobRecord, words: tuple[str, ...], log: Callable[[str], None]
) -> tuple[str, ...]:
    """Add this machine's login of the hub if the job began with it and it is not given."""
    if not record.more.get("hub_token") or any(word.startswith("HF_TOKEN=") for word in words):
        return words
    try:
        token = find_hub_token()
    except UsageError:
        return words
    log("sending this machine's Hugging Face login, because the job began with --env HF_TOKEN")
    return (*words, f"HF_TOKEN={token}")


def _restore(session: JobSession, bucket: S3Location, job: str) -> JobEnd | None:
    """Bring the job to the head, unless the head has it with a checkpoint that is as new.

    Returns how it ended where it comes from, if that is known.
    """
    context, place = session.context, bucket.below(job)
    known = [each for each in list_jobs(session.head) if each.job == job]
    if known and known[0].is_active:
        return None  # and so it is refused
    note, paths = context.progress.note, JobPaths(job)
    url, cloud = str(place), context.cloud.flag
    done = restore_files(session.head, paths, url, note, is_new=not known, cloud=cloud)
    if not done["size"]:
        context.on_log(f"node0 has job {job} with {done['checkpoint']}, as new as that in S3")
        return None
    context.on_log(f"{format_size(done['size'])} of job {job} came from {place}")
    if not done["has_ended"]:
        context.on_log(
            f"warning: {place} does not say that the job has ended; "
            "if it still runs on another cluster, cancel it there"
        )
    return parse_end(done.get("end", {}))


def describe_fewer(record: JobRecord, plan: JobPlan) -> str:
    """Return a line about a job that continues with fewer ranks than it began with."""
    resources = plan.spec.resources
    now = (resources.nodes or 0) * (resources.placement.nproc_per_node or 0)
    before = counted(record.nnodes * record.placement.nproc_per_node, "rank")
    return (
        f"the job began with {before} and continues with {now}, on the same samples per step; "
        "dropout differs, so the result is not bit-identical"
    )


def choose_unfinished(
    jobs: tuple[JobSummary, ...], task: str, job_id: str | None, cluster: str
) -> JobSummary:
    """Return the task's job with that ID; by default the last unfinished one.

    Jobs with a checkpoint come first. Raises :class:`UsageError` if there is none, or if it is complete or
    still running.
    """
    own = [job for job in jobs if job.job.startswith(f"{task}-")]
    unfinished = [job for job in own if job.unfinished and not job.is_active]
    if job_id is None and unfinished:
        # A job that failed in its first seconds must not hide hours of work.
        return ([job for job in unfinished if job.checkpoint] or unfinished)[-1]
    if job_id is None:
        raise UsageError(
            f"no unfinished {task} job on cluster {cluster}",
            hint=f"`train {task}` without --resume starts one",
        )
    found = choose_job(jobs, job_id)
    if found not in own:
        raise UsageError(f"job {job_id} is not one of `train {task}`")
    if found.is_active:
        raise UsageError(
            f"job {job_id} is {found.state}", hint=f"to follow it: spr-cluster attach {job_id}"
        )
    if not found.unfinished:
        raise UsageError(
            f"job {job_id} has nothing to resume: it is finished, or not a training job"
        )
    return found


def require_steps_left(step: int, total: str, record: JobRecord, options: TrainOptions) -> None:
    """Raise :class:`UsageError` if a run with these options ends before its checkpoint.

    ``total`` is its number of steps; "" if unknown.
    """
    before = options_of(record)
    if not total.strip().isdecimal() or before.max_steps is not None:
        return
    steps = int(total) // max(before.epochs, 1) * options.epochs
    steps = min(steps, options.max_steps or steps)
    if step > steps:
        raise UsageError(
            f"job {record.job} is at step {step}, and with these options it has only {steps} steps",
            hint="raise --epochs or --max-steps to at least the original value",
        )


def plan_again(record: JobRecord, request: ResumeRequest, nodes: int, job: str) -> JobPlan:
    """Return the job's plan on at most ``nodes`` nodes, with its ranks, or fewer that share their work. Pure.

    Raises :class:`UsageError` if its ranks don't fit.
    """
    before = record.placement.nproc_per_node
    ranks = record.nnodes * before
    per_node = request.spec.resources.placement.nproc_per_node or before
    planned, uneven = divmod(ranks, per_node)
    if uneven:
        raise UsageError(
            f"--ppn {per_node}: job {job} has {counted(ranks, 'rank')}, {before} on each of "
            f"{counted(record.nnodes, 'node')}",
            hint=f"omit it, or use one by which {ranks} can be divided",
        )
    used = min(nodes, planned)
    options = options_again(record, request)
    stage = tuple((str(url), str(target)) for url, target in record.more.get("stage", ()))
    # A study's plan precedes its options.
    study = json.loads(record.argv[-2]) if "worker.study" in record.argv else {}
    if study and (changed := sorted(request.changes.keys() & MAY_CHANGE)):
        raise UsageError(f"{flag(changed[0])}: the trials of a study have the same options")
    spec = replace(
        request.spec,
        work=replace(spec_of(options).work, study=study),
        resources=Resources(
            used,
            replace(record.options, nproc_per_node=per_node),
            cores=record.cores,
            memory_gib=record.memory_gib,
        ),
        storage=replace(request.spec.storage, stage=stage),
    )
    return replace(
        plan_options(spec, options, offline=False),
        env=record.env,
        packages=job_packages(options, study),
        variables=request.env,
        planned_nodes=planned if used < planned else 0,
    )


def options_of(record: JobRecord) -> TrainOptions:
    """Return the options that a job was submitted with."""
    options: TrainOptions = TASKS[record.kind].Options.from_json(record.argv[-1])
    return options


def options_again(record: JobRecord, request: ResumeRequest) -> TrainOptions:
    """Return the job's options with the requested changes."""
    try:
        before = options_of(record)
    except (ValueError, TypeError):
        raise JobError(
            f"the options of the job's record are not those of this release: {' '.join(record.argv)}"
        ) from None
    return change_options(before, {**request.changes, "resume": True})
