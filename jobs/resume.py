"""``train squad --resume``: a job that was interrupted, continued where its last checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.nodes import Cluster, HostOpener
from infra.errors import JobError, UsageError
from infra.progress import Progress
from jobs import launch
from jobs.listing import choose_unfinished, list_jobs
from jobs.placement import plan_placement
from jobs.record import Ground, Where
from jobs.request import check_holder, chosen_backend, require_able_stack
from jobs.running import Event, Output, ask_facts, private_addresses, require_all_nodes
from jobs.spec import JobPaths
from jobs.squad.options import TrainOptions, parse_argv
from jobs.started import Started, parse_started
from jobs.train import Prepared, build_command, finish
from provision.host import Host
from provision.stacks import Stack


@dataclass(frozen=True)
class ResumeRequest:
    """``job`` is an id, or ``None`` for the last unfinished one; ``results`` likewise ``None`` for
    ``results/JOB``. ``changes`` are training options, by name, that are to be other than before."""

    job: str | None
    results: Path | None = None
    changes: Mapping[str, Any] | None = None
    nproc_per_node: int | None = None
    where: Where = field(default_factory=Where)


def resume(
    cluster: Cluster,
    stack: Stack,
    open_host: HostOpener,
    request: ResumeRequest,
    *,
    progress: Progress,
    now: datetime,
    on_event: Callable[[Event], None],
    on_log: Callable[[str], None],
) -> tuple[Event, Path]:
    """Continue a job; returns the content of its ``results.json``, and where its results are here.

    Raises :class:`UsageError` for a job that can't be continued so, :class:`JobError` where it failed.
    """
    require_able_stack(stack)
    head = open_host(cluster.head)
    require_all_nodes(cluster)
    with progress.phase("Look for the job"):
        launch.require_idle(head)
        found = choose_unfinished(list_jobs(head), request.job, cluster.name)
        paths = JobPaths(found.job)
        started = _read_started(head, paths)
        if len(cluster.nodes) > started.nnodes and request.nproc_per_node is None:
            on_log(f"on the first {started.nnodes} nodes of {len(cluster.nodes)}, as it began")
            cluster = cluster.first(started.nnodes)
    results = request.results or Path("results", paths.job_id)
    check_holder(results, paths.job_id)
    with progress.phase(f"Prepare job {paths.job_id}"):
        started = plan_again(started, request, len(cluster.nodes), paths)
        options = options_again(started, request)
        facts = ask_facts(cluster, open_host)
        backend = chosen_backend(options, stack)
        placement = plan_placement(facts, private_addresses(cluster), started.placement, backend)
        command = build_command(cluster, stack, placement, options, paths, offline=started.offline)
        # A node that was replaced has none of them.
        launch.place_again(head, paths, len(cluster.nodes))
    on_log(f"job {paths.job_id} goes on from {found.checkpoint or 'its beginning'}")
    ground = Ground(cluster, stack, request.where)
    prepared = Prepared(ground, paths, command, placement, tuple(options.to_argv()))
    output = Output(on_event, on_log)
    return finish(prepared, head, results, output, progress, now), results


def _read_started(head: Host, paths: JobPaths) -> Started:
    try:
        return parse_started(head.run(f"cat {paths.started}").stdout)
    except (ValueError, TypeError, KeyError) as error:
        raise JobError(f"{paths.started} on node0 can't be read: {error}") from error


def plan_again(started: Started, request: ResumeRequest, nodes: int, paths: JobPaths) -> Started:
    """The same for a cluster of so many nodes; raises :class:`UsageError` for other ranks."""
    per_node = request.nproc_per_node or started.nproc_per_node
    if nodes * per_node != started.world_size:
        was = f"{started.world_size} ranks ({started.nproc_per_node} on each of {started.nnodes} nodes)"
        fitting, rest = divmod(started.world_size, nodes)
        way = f"--ppn {fitting}, or " if not rest and fitting else ""
        raise UsageError(
            f"job {paths.job_id} has {was}, and this would be {nodes * per_node} "
            f"({per_node} on each of {nodes})",
            hint=f"{way}a cluster of {started.nnodes} nodes (`spr-cluster up --nodes "
            f"{started.nnodes}`), or a new job without --resume",
        )
    wish = replace(started.placement, nproc_per_node=per_node)
    return replace(started, placement=wish, nnodes=nodes, nproc_per_node=per_node)


def options_again(started: Started, request: ResumeRequest) -> TrainOptions:
    """The job's own options, with those that are to be other."""
    try:
        return replace(parse_argv(started.argv), **{**(request.changes or {}), "resume": True})
    except ValueError as error:
        raise UsageError(str(error)) from None
