"""``train squad``: from options to a result, over a cluster."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cluster.nodes import Cluster, HostOpener
from infra.errors import HostError, JobError
from infra.progress import Progress
from infra.words import counted
from jobs import launch
from jobs.listing import list_jobs
from jobs.mpirun import LaunchCommand, build_launch_command
from jobs.placement import Placement, plan_placement
from jobs.record import Ground, JobRecord, Recorder, describe_placement, make_record
from jobs.request import (
    TrainRequest,
    chosen_backend,
    job_files,
    local_model,
    needs_hub,
    options_on_nodes,
    require_able_stack,
)
from jobs.running import (
    Event,
    Output,
    ask_facts,
    explain,
    private_addresses,
    require_all_nodes,
    run_command,
)
from jobs.spec import JobPaths, JobSpec, PlacementWish, new_job_id
from jobs.squad.options import TrainOptions, parse_argv
from jobs.squad.stopping import EXIT_CODE as STOPPED
from jobs.started import Started
from jobs.tuned import Tuned, TunedKey, describe_nodes, read_tuned
from provision.facts import HostFacts
from provision.host import Host
from provision.stacks import Stack
from provision.stacks.oneccl import environment_lookup
from provision.stacks.stack import BINDING

CHECKPOINT_SECONDS = 120
"""A job that is told to end gets so long to keep a checkpoint: of a large model it has gigabytes."""


def train(
    cluster: Cluster,
    stack: Stack,
    open_host: HostOpener,
    request: TrainRequest,
    *,
    progress: Progress,
    now: datetime,
    on_event: Callable[[Event], None],
    on_log: Callable[[str], None],
) -> Event:
    """Run the job on all nodes and return the content of its ``results.json``.

    Raises :class:`JobError` where it failed. Ctrl-C ends the job on the nodes, too.
    """
    require_able_stack(stack)
    paths = JobPaths(new_job_id("squad", now))
    head = open_host(cluster.head)
    require_all_nodes(cluster)
    cluster = cluster.first(request.nodes)
    with progress.phase(f"Prepare job {paths.job_id}"):
        launch.require_idle(head)
        facts = ask_facts(cluster, open_host)
        request = _with_tuned(cluster, stack, head, facts, request, on_log)
        options = request.options
        placement = plan_training(cluster, stack, facts, request)
        command = build_training(cluster, stack, placement, options, paths)
        started = Started(
            argv=tuple(options_on_nodes(options, stack, paths).to_argv()),
            nnodes=len(cluster.nodes),
            nproc_per_node=placement.ranks.nproc_per_node,
            placement=request.placement,
            offline=not needs_hub(options),
        )
        files = {**job_files(options), "start.json": started.render()}
        launch.place_files(head, paths, files, len(cluster.nodes))
    ground = Ground(cluster, stack, request.where)
    prepared = Prepared(ground, paths, command, placement, started.argv)
    output = Output(on_event, on_log)
    return finish(prepared, head, request.results, output, progress, now)


@dataclass(frozen=True)
class Prepared:
    """A training job whose files are on its nodes; ``argv`` are the options of its ranks."""

    ground: Ground
    paths: JobPaths
    command: LaunchCommand
    placement: Placement
    argv: Sequence[str]

    def record(self, now: datetime) -> JobRecord:
        """What is kept of it beside its results."""
        argv = ("python", "-m", "squad", *self.argv)
        return replace(
            make_record(self.paths.job_id, self.ground, argv, self.command, now),
            placement=describe_placement(self.placement, parse_argv(self.argv).backend),
            more={"recipe": "fast"},
        )


def finish(
    job: Prepared, head: Host, results: Path, output: Output, progress: Progress, now: datetime
) -> Event:
    """Run a training job that is prepared, and bring home what it makes.

    Returns its ``results.json``. Raises :class:`JobError` where it failed; Ctrl-C has it keep a
    checkpoint and end.
    """
    cluster, paths = job.ground.cluster, job.paths
    recorder = Recorder(results, job.record(now))
    recorder.begin()
    with progress.phase(f"Train on {counted(len(cluster.nodes), 'node')}"):
        try:
            exit_code = run_command(head, job.command, paths, output, grace_s=CHECKPOINT_SECONDS)
        except KeyboardInterrupt:
            with suppress(OSError, HostError):
                output.on_log(_way_back(cluster, head, paths, results))
            raise
    recorder.end(exit_code)
    with progress.phase("Fetch the results"):
        launch.fetch(head, paths, results)
    if exit_code == STOPPED:
        raise JobError(
            f"job {paths.job_id} was told to end",
            hint=_way_back(cluster, head, paths, results),
        )
    written = results / "results.json"
    if exit_code != 0 or not written.is_file():
        hint = f"the whole log is {results / 'log'}"
        if _kept(head, paths):
            hint += f"; {_way_back(cluster, head, paths, results)}"
        raise explain(exit_code, output, hint)
    content: Event = json.loads(written.read_text())
    return content


def _way_back(cluster: Cluster, head: Host, paths: JobPaths, results: Path) -> str:
    kept = _kept(head, paths)
    what = f"checkpoint {kept} is kept" if kept else "there is no checkpoint yet"
    return f"{what}; go on with the job: {_resume_command(cluster, paths, results)}"


def _kept(head: Host, paths: JobPaths) -> str:
    """The newest checkpoint's name, "" for none."""
    return {job.job: job.checkpoint for job in list_jobs(head)}.get(paths.job_id, "")


def _resume_command(cluster: Cluster, paths: JobPaths, results: Path) -> str:
    words = ["spr-cluster", "train", "squad", "--resume", paths.job_id, "--name", cluster.name]
    if results != Path("results", paths.job_id):
        words += ["--results", str(results)]
    return shlex.join(words)


def _with_tuned(
    cluster: Cluster,
    stack: Stack,
    head: Host,
    facts: Mapping[str, HostFacts],
    request: TrainRequest,
    on_log: Callable[[str], None],
) -> TrainRequest:
    """The request with what `tune` has found for it, where the user left that open."""
    if not request.may_tune:
        return request
    found = read_tuned(head, tuned_key(stack, request.options, request.placement, facts))
    if found is None:
        return request
    changed, told = take_tuned(found, request, len(cluster.nodes))
    if told:
        on_log(told)
    return changed


def take_tuned(found: Tuned, request: TrainRequest, nodes: int) -> tuple[TrainRequest, str]:
    """The request with a saved result in it, and the line that tells the user; "" for no change."""
    told = []
    options, wish = request.options, request.placement
    if "placement" in request.may_tune:
        wish = replace(
            wish, nproc_per_node=found.nproc_per_node, ccl_workers=found.ccl_workers or None
        )
        told.append(f"--ppn {found.nproc_per_node}")
        told += [f"--ccl-workers {found.ccl_workers}"] if found.ccl_workers else []
    # Another global batch learns otherwise, so it is only taken where `tune` was asked about it.
    if "batch_size" in request.may_tune and found.batch_size:
        options = replace(options, batch_size=found.batch_size)
        told.append(f"--batch-size {found.batch_size}")
        if wish.nproc_per_node:
            features = found.batch_size * wish.nproc_per_node * nodes
            told.append(f"(a global batch of {features} features)")
    line = f"{' '.join(told)} from `spr-cluster tune` of {found.day}; --no-tuned leaves it out"
    return replace(request, options=options, placement=wish), line if told else ""


def tuned_key(
    stack: Stack, options: TrainOptions, wish: PlacementWish, facts: Mapping[str, HostFacts]
) -> TunedKey:
    """What a result of `tune` is for: the same stack, model and arithmetic on the same nodes."""
    return TunedKey(
        stack=stack.name,
        backend=chosen_backend(options, stack),
        fabric=wish.fabric,
        dtype=options.dtype,
        ipex=options.ipex or stack.use_ipex,
        model=_model_identity(options),
        max_length=options.max_length,
        nodes=describe_nodes(facts.values()),
    )


def _model_identity(options: TrainOptions) -> str:
    """A name on the hub, or a folder's configuration: its shape decides how fast it trains."""
    folder = local_model(options)
    if folder is None:
        return options.model
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return f"config.json {digest[:16]}"


def plan_training(
    cluster: Cluster, stack: Stack, facts: Mapping[str, HostFacts], request: TrainRequest
) -> Placement:
    """Where the ranks of a training run go, on nodes that are what ``facts`` says."""
    backend = chosen_backend(request.options, stack)
    return plan_placement(facts, private_addresses(cluster), request.placement, backend)


def build_training(
    cluster: Cluster, stack: Stack, placement: Placement, options: TrainOptions, paths: JobPaths
) -> LaunchCommand:
    """The mpirun line of a training run whose placement is known."""
    sent = options_on_nodes(options, stack, paths)
    offline = not needs_hub(options)
    return build_command(cluster, stack, placement, sent, paths, offline=offline)


def build_command(
    cluster: Cluster,
    stack: Stack,
    placement: Placement,
    options: TrainOptions,
    paths: JobPaths,
    *,
    offline: bool,
) -> LaunchCommand:
    """The mpirun line of a training run with options in the nodes' own terms."""
    job = JobSpec(
        id=paths.job_id,
        module="squad",
        argv=tuple(options.to_argv()),
        nnodes=len(cluster.nodes),
        nproc_per_node=placement.ranks.nproc_per_node,
        backend=chosen_backend(options, stack),
        # A hub that is not asked can't delay or fail a job that needs nothing from it.
        env={**stack.environment, "HF_HUB_OFFLINE": "1" if offline else ""},
        ccl_lookup=environment_lookup(stack.pin(BINDING) or "1.12"),
    )
    return build_launch_command(job, placement, paths, cluster.head.private_ip)
