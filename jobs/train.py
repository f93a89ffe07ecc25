"""``train squad``: from options to a result, over a cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.nodes import Cluster, HostOpener
from infra.errors import JobError, UsageError
from infra.progress import Progress
from jobs import launch, squad
from jobs.mpirun import LaunchCommand, build_launch_command
from jobs.placement import plan_placement
from jobs.spec import JobPaths, JobSpec, PlacementWish, new_job_id
from jobs.squad.dataset import read_dataset
from jobs.squad.errors import DatasetError
from jobs.squad.events import parse_event
from jobs.squad.options import SCRATCH, TrainOptions
from provision.facts import gather_facts
from provision.host import Host, on_all
from provision.stacks import Stack
from provision.stacks.oneccl import environment_lookup
from provision.stacks.stack import BINDING, TORCH
from provision.stacks.versions import python_minor, release

Event = dict[str, Any]
_KEPT_LOG_LINES = 200
# The job's code uses zip's strict (Python 3.10) and the fused AdamW for CPUs (torch 2.4).
_OLDEST_PYTHON, _OLDEST_TORCH = "3.10", "2.4"


@dataclass(frozen=True)
class TrainRequest:
    """A training run as wished for, on this machine's paths; ``results`` receives what it makes."""

    options: TrainOptions
    results: Path
    placement: PlacementWish = field(default_factory=PlacementWish)


@dataclass
class _Output:
    """What a job says: events for the display, the last log lines, errors."""

    on_event: Callable[[Event], None]
    on_log: Callable[[str], None]
    lines: list[str] = field(default_factory=list)
    errors: list[Event] = field(default_factory=list)

    def take(self, line: str) -> None:
        event = parse_event(line)
        if event is None:
            self.lines = [*self.lines[-_KEPT_LOG_LINES:], line]
            self.on_log(line)
            return
        if event["event"] == "error":
            self.errors.append(event)
        self.on_event(event)


def check_request(request: TrainRequest) -> None:
    """Look at everything that can be judged on this machine, before a cluster is touched.

    Raises :class:`UsageError` naming the file and record, or the model, that can't be used.
    """
    options = request.options
    for path in filter(None, (options.data, options.eval)):
        try:
            read_dataset(Path(path))
        except DatasetError as error:
            raise UsageError(error.message, hint=error.hint) from None
    _check_results(request.results)
    model = local_model(options)
    if model and not (model / "config.json").is_file():
        raise UsageError(
            f"--model {options.model}: no config.json in it, so it is not a model's folder",
            hint="a folder written by save_pretrained, or a model's name on the hub",
        )


def _check_results(folder: Path) -> None:
    """A folder that can't be made must not be found out after hours of training."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"--results {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--results {folder}: this user can't write into {there}")


def expand_home(path: str) -> Path:
    """A path as the shell would take it; a ``~name`` of nobody stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's fails for nobody


def local_model(options: TrainOptions) -> Path | None:
    """The model's folder on this machine; ``None`` for a name on the hub or a new model.

    Raises :class:`UsageError` for what is clearly a path, and isn't there.
    """
    if options.model == SCRATCH:
        return None
    path = expand_home(options.model)
    if path.is_dir():
        return path
    if path.is_file() or options.model.startswith(("/", ".", "~")):
        raise UsageError(f"--model {options.model}: no such folder")
    return None


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
    _require_all_nodes(cluster)
    with progress.phase(f"Prepare job {paths.job_id}"):
        launch.require_idle(head)
        command = plan_command(cluster, stack, open_host, request, paths)
        launch.place_files(head, paths, job_files(request.options))
    output = _Output(on_event, on_log)
    with progress.phase(f"Train on {len(cluster.nodes)} nodes"):
        for warning in command.warnings:
            on_log(f"warning: {warning}")
        on_log(f"$ {command}")
        exit_code = _run(head, command, paths, output)
    with progress.phase("Fetch the results"):
        launch.fetch(head, paths, request.results)
    written = request.results / "results.json"
    if exit_code != 0 or not written.is_file():
        raise _failure(exit_code, output, request.results)
    content: Event = json.loads(written.read_text())
    return content


def require_able_stack(stack: Stack) -> None:
    """Raises :class:`UsageError` where the stack is too old for our own job's code."""
    torch = stack.pin(TORCH) or "0"
    python_is_old = python_minor(stack.python) < python_minor(_OLDEST_PYTHON)
    if python_is_old or release(torch) < release(_OLDEST_TORCH):
        raise UsageError(
            f"`train squad` can't run on stack {stack.name}: it needs Python {_OLDEST_PYTHON} and "
            f"torch {_OLDEST_TORCH} or newer, and this has Python {stack.python} and torch {torch}",
            hint="use a cluster with --stack intel or upstream",
        )


def _require_all_nodes(cluster: Cluster) -> None:
    """mpirun's hostfile names all nodes: with one of them gone it would wait for it in vain."""
    if not cluster.is_whole:
        missing = len(cluster.nodes) != cluster.wanted_nodes
        why = f"{len(cluster.nodes)} of {cluster.wanted_nodes} nodes are running"
        raise JobError(
            f"cluster {cluster.name} is not whole: "
            + (why if missing else "its nodes were not connected yet"),
            hint=f"`spr-cluster repair --name {cluster.name}` replaces and connects them, "
            "`spr-cluster status` shows them",
        )


def plan_command(
    cluster: Cluster, stack: Stack, open_host: HostOpener, request: TrainRequest, paths: JobPaths
) -> LaunchCommand:
    """Ask the nodes what they are and build the mpirun line from it."""
    hosts = [open_host(node) for node in cluster.nodes]
    hint = f"`spr-cluster repair --name {cluster.name}` replaces nodes that do not answer"
    facts = on_all("asking the nodes for their facts", hosts, gather_facts, hint=hint)
    options = options_on_nodes(request.options, stack, paths)
    placement = plan_placement(
        facts,
        {node.name: node.private_ip for node in cluster.nodes},
        request.placement,
        options.backend,
    )
    job = JobSpec(
        id=paths.job_id,
        module="squad",
        argv=tuple(options.to_argv()),
        nnodes=len(cluster.nodes),
        nproc_per_node=placement.ranks.nproc_per_node,
        backend=options.backend,
        # A hub that is not asked can't delay or fail a job that needs nothing from it.
        env={
            **stack.environment,
            "HF_HUB_OFFLINE": "1" if not _needs_hub(request.options) else "",
        },
        ccl_lookup=environment_lookup(stack.pin(BINDING) or "1.12"),
    )
    return build_launch_command(job, placement, paths, cluster.head.private_ip)


def _needs_hub(options: TrainOptions) -> bool:
    from_hub = options.model != SCRATCH and local_model(options) is None
    return from_hub or options.data is None


def options_on_nodes(options: TrainOptions, stack: Stack, paths: JobPaths) -> TrainOptions:
    """The same wishes, with the nodes' paths and the stack's own backend for ``auto``."""
    return replace(
        options,
        model=paths.model if local_model(options) else options.model,
        data=f"{paths.data}/train.json" if options.data else None,
        eval=f"{paths.data}/eval.json" if options.eval else None,
        output=paths.output,
        backend=stack.backend if options.backend == "auto" else options.backend,
        ipex=options.ipex or stack.use_ipex,
    )


def job_files(options: TrainOptions) -> Mapping[str, Path | bytes]:
    """What the nodes need, by name below the job's folder: code, data, and a local model."""
    code = Path(squad.__file__).parent
    files: dict[str, Path | bytes] = {
        f"code/squad/{source.name}": source for source in sorted(code.glob("*.py"))
    }
    if options.data:
        files["data/train.json"] = Path(options.data)
    if options.eval:
        files["data/eval.json"] = Path(options.eval)
    model = local_model(options)
    if model:
        files["model"] = model.resolve()
    files["output/.keep"] = b""
    return files


def _run(head: Host, command: LaunchCommand, paths: JobPaths, output: _Output) -> int:
    try:
        launch.submit(head, command, paths)
        return launch.follow(head, paths, output.take)
    except KeyboardInterrupt:
        head.close()
        launch.cancel(head, paths)
        output.on_log("the job was ended on its nodes")
        raise


def _failure(exit_code: int, output: _Output, results: Path) -> JobError:
    """The first cause: a rank that only lost its peer says so and comes last."""
    hint = f"the whole log is {results / 'log'}"
    causes = sorted(output.errors, key=lambda event: bool(event.get("lost_peer")))
    if causes:
        first = causes[0]
        where = f"rank {first.get('rank')} on {first.get('host')}: "
        own = first.get("hint")
        return JobError(where + str(first["message"]), hint=f"{own}; {hint}" if own else hint)
    known = launch.explain_failure(output.lines)
    last = next((line for line in reversed(output.lines) if line.strip()), "no output")
    return JobError(known or f"the job ended with exit code {exit_code}: {last.strip()}", hint=hint)
