"""``train squad --resume``: continue an interrupted job from its last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.errors import JobError, UsageError
from infra.words import counted
from jobs.launch.history import choose_unfinished, list_jobs
from jobs.launch.manifest import JobManifest, read_manifest
from jobs.launch.plan import JobPaths, JobPlan
from jobs.launch.session import JobContext, JobSession, run_job
from jobs.train.request import check_results, require_able_stack
from jobs.train.train import plan_options, read_results
from jobs.worker.squad.options import TrainOptions, parse_argv


@dataclass(frozen=True)
class ResumeRequest:
    """Which job to resume; ``None`` for the last unfinished one. ``results`` defaults to ``results/JOB``.

    ``changes`` are training options, by name, that differ from before.
    """

    job: str | None
    results: Path | None = None
    changes: Mapping[str, Any] | None = None
    nproc_per_node: int | None = None
    retries: int = 0


def resume(context: JobContext, request: ResumeRequest) -> tuple[dict[str, Any], Path]:
    """Continue a job; return the content of its ``results.json`` and the folder of that file.

    Raises :class:`UsageError` if the job can't be resumed, :class:`JobError` if it fails.
    """
    require_able_stack(context.stack)
    done = run_job(context, "squad", lambda session: _plan_resumed(session, request))
    return read_results(done), done.plan.results or Path()


def _plan_resumed(session: JobSession, request: ResumeRequest) -> JobPlan:
    cluster, log = session.context.cluster, session.context.on_log
    found = choose_unfinished(list_jobs(session.head), request.job, cluster.name)
    paths = JobPaths(found.job)
    results = request.results or Path("results", found.job)
    check_results(results, found.job)
    manifest = read_manifest(session.head, paths)
    nodes = len(cluster.nodes)
    if nodes > manifest.nnodes and request.nproc_per_node is None:
        log(f"using {counted(manifest.nnodes, 'node')} of {nodes}, as before")
        nodes = manifest.nnodes
    plan = plan_again(manifest, request, nodes, found.job)
    log(f"job {found.job} resumes from {found.checkpoint or 'the beginning'}")
    return replace(plan, results=results, resumed_job=found.job)


def plan_again(manifest: JobManifest, request: ResumeRequest, nodes: int, job: str) -> JobPlan:
    """Return the job's plan on ``nodes`` nodes. Raises :class:`UsageError` if the ranks change. Pure."""
    per_node = request.nproc_per_node or manifest.nproc_per_node
    if nodes * per_node != manifest.world_size:
        fitting, rest = divmod(manifest.world_size, nodes)
        ppn = f"--ppn {fitting}, or " if not rest and fitting else ""
        raise UsageError(
            f"job {job} has {counted(manifest.world_size, 'rank')} ({manifest.nproc_per_node} on each of "
            f"{counted(manifest.nnodes, 'node')}), and this cluster would run {nodes * per_node} "
            f"({per_node} on each of {nodes})",
            hint=f"use {ppn}a cluster of {counted(manifest.nnodes, 'node')} (`up --nodes "
            f"{manifest.nnodes}`), or start a new job without --resume",
        )
    plan = plan_options(options_again(manifest, request), offline=bool(manifest.env))
    placement = replace(manifest.placement, nproc_per_node=per_node)
    return replace(plan, placement=placement, nodes=nodes, retries=request.retries)


def options_again(manifest: JobManifest, request: ResumeRequest) -> TrainOptions:
    """Return the job's options with the requested changes."""
    try:
        return replace(parse_argv(manifest.argv), **{**(request.changes or {}), "resume": True})
    except ValueError as error:
        raise UsageError(str(error)) from None
    except SystemExit:  # argparse has named the word
        raise JobError(
            f"the options of the job's record are not those of this release: {' '.join(manifest.argv)}"
        ) from None
