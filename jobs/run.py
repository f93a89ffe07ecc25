"""``run``: any program over the nodes of a cluster, placed as a training job is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import jobs
from cluster.nodes import Cluster, HostOpener
from infra.errors import UsageError
from infra.progress import Progress
from infra.words import counted
from jobs import launch
from jobs.mpirun import LaunchCommand, build_launch_command
from jobs.placement import Placement, plan_placement
from jobs.record import (
    Ground,
    JobRecord,
    Recorder,
    Where,
    describe_placement,
    make_record,
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
from jobs.workfiles import WorkFiles
from provision.stacks import Stack
from provision.stacks.oneccl import environment_lookup
from provision.stacks.stack import BINDING

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=.*", re.DOTALL)
# What the placement and the launcher decide: another value would contradict where the ranks are.
_DECIDED = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|(SPR|PMI|MPI|I_MPI|CCL_WORKER)_.*"
)


@dataclass(frozen=True)
class RunRequest:
    """A program as wished for. ``results`` receives what it writes, its log and ``job.json``.

    ``env`` are ``NAME=VALUE`` for the program; ``nodes`` the number of the first nodes to use,
    ``None``: all. ``backend`` is what the placement reckons with: oneCCL wants cores of its own.
    """

    command: tuple[str, ...]
    files: WorkFiles
    results: Path
    placement: PlacementWish = field(default_factory=PlacementWish)
    nodes: int | None = None
    env: tuple[str, ...] = ()
    backend: str = "auto"
    kind: str = "run"
    where: Where = field(default_factory=Where)

    def backend_on(self, stack: Stack) -> str:
        return stack.backend if self.backend == "auto" else self.backend


def check_variables(words: Sequence[str]) -> tuple[str, ...]:
    """``NAME=VALUE`` each, and none that the placement decides; raises :class:`UsageError`."""
    for word in words:
        match = _VARIABLE.fullmatch(word)
        if not match:
            raise UsageError(f"--env {word}: expected NAME=VALUE")
        if _DECIDED.fullmatch(match[1]):
            raise UsageError(
                f"--env {match[1]}: that is set for every rank, by where it runs",
                hint="--nodes, --ppn, --placement and --ccl-workers decide about it",
            )
    return tuple(words)


def run(
    cluster: Cluster,
    stack: Stack,
    open_host: HostOpener,
    request: RunRequest,
    *,
    progress: Progress,
    now: datetime,
    on_event: Callable[[Event], None],
    on_log: Callable[[str], None],
) -> JobRecord:
    """Run the program in every rank and bring home what it wrote.

    Raises :class:`JobError` where it failed. Ctrl-C ends the job on the nodes, too.
    """
    paths = JobPaths(new_job_id(request.kind, now))
    head = open_host(cluster.head)
    require_all_nodes(cluster)
    used = cluster.first(request.nodes)
    with progress.phase(f"Prepare job {paths.job_id}"):
        launch.require_idle(head)
        backend = request.backend_on(stack)
        facts = ask_facts(used, open_host)
        placement = plan_placement(facts, private_addresses(used), request.placement, backend)
        command = build_program(used, stack, placement, request, paths)
        progress.note(f"sending {request.files}")
        launch.place_files(head, paths, program_files(request), len(used.nodes))
    record = _describe(Ground(used, stack, request.where), request, placement, command, paths, now)
    recorder = Recorder(request.results, record)
    recorder.begin()
    output = Output(on_event, on_log)
    with progress.phase(f"Run on {counted(len(used.nodes), 'node')}"):
        exit_code = run_command(head, command, paths, output)
    done = recorder.end(_programs_own(output, exit_code))
    with progress.phase("Fetch the output"):
        launch.gather(head, paths, len(used.nodes), on_log)
        launch.fetch(head, paths, request.results)
    if exit_code != 0:
        raise explain(exit_code, output, f"the whole log is {request.results / 'log'}")
    return done


def _describe(
    ground: Ground,
    request: RunRequest,
    placement: Placement,
    command: LaunchCommand,
    paths: JobPaths,
    now: datetime,
) -> JobRecord:
    """What is kept of it beside its results; of its variables the names alone."""
    return replace(
        make_record(paths.job_id, ground, request.command, command, now),
        placement=describe_placement(placement, request.backend_on(ground.stack)),
        more={
            "files": len(request.files.files),
            "bytes": request.files.size,
            "env": [word.partition("=")[0] for word in request.env],
        },
    )


def _programs_own(output: Output, exit_code: int) -> int:
    """The exit code of the rank that failed first; mpirun's own is another over several nodes."""
    told = (event["exit_code"] for event in output.errors if "exit_code" in event)
    return int(next(told, exit_code))


def build_program(
    cluster: Cluster, stack: Stack, placement: Placement, request: RunRequest, paths: JobPaths
) -> LaunchCommand:
    """The mpirun line by which every rank checks its place and becomes the program."""
    backend = request.backend_on(stack)
    argv = [f"--folder={paths.work}", f"--output={paths.output}"]
    argv += [f"--environment={paths.environment}"] if request.env else []
    job = JobSpec(
        id=paths.job_id,
        module="jobs.program",
        argv=(*argv, "--", *request.command),
        nnodes=len(cluster.nodes),
        nproc_per_node=placement.ranks.nproc_per_node,
        backend=backend,
        env={**stack.environment, "SPR_BACKEND": backend},
        ccl_lookup=environment_lookup(stack.pin(BINDING) or "1.12"),
    )
    return build_launch_command(job, placement, paths, cluster.head.private_ip)


def program_files(request: RunRequest) -> Mapping[str, Path | bytes]:
    """What the nodes need, by name below the job's folder: our check of the rank, the user's files.

    The variables' values travel as a file too: mpirun's arguments are seen by all, and kept in records.
    """
    root = Path(jobs.__file__).parent
    ours = [root / "__init__.py", *sorted(root.glob("program/*.py"))]
    ours += [root / "squad" / f"{name}.py" for name in _FROM_SQUAD]
    sent: dict[str, Path | bytes] = {
        f"code/jobs/{source.relative_to(root)}": source for source in ours
    }
    return {
        **sent,
        **{f"work/{name}": path for name, path in request.files.files.items()},
        **({"environment.json": json.dumps(request.env).encode()} if request.env else {}),
        "work/.keep": b"",
        "output/.keep": b"",
    }


_FROM_SQUAD = ("__init__", "distributed", "errors", "events", "pinning", "rank", "stopping")
