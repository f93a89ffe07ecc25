"""Running jobs: the only module that checks the cluster, inspects nodes, places files, starts, and records.

:func:`run_job` runs one job from its plan to its results. A study that makes several short runs opens a
:class:`JobSession` itself and places the files once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from cluster.nodes import Cluster, HostOpener
from cluster.running_job import job_is_running
from infra.errors import HangupError, HostError, JobError
from infra.progress import Progress, Silent
from infra.words import counted
from jobs.launch import files
from jobs.launch.follow import Event, JobOutput, explain, run_command
from jobs.launch.history import list_jobs
from jobs.launch.launcher import HeadLauncher, Launcher, LauncherFactory
from jobs.launch.manifest import JobManifest
from jobs.launch.mpirun import LaunchCommand, build_launch_command
from jobs.launch.placement import Placement, plan_placement
from jobs.launch.plan import GATHER, MANIFEST, JobPaths, JobPlan, PlacementOptions, new_job_id
from jobs.launch.record import CloudInfo, JobRecord, Recorder, describe_placement
from jobs.worker.runtime.stopping import EXIT_CODE as STOPPED
from provision.facts import HostFacts, gather_facts
from provision.host import Host, on_all
from provision.stacks.stack import Stack


def _ignore(_: object) -> None:
    return None


@dataclass(frozen=True)
class JobContext:
    """What every job needs: the cluster, its software, and where to report progress."""

    cluster: Cluster
    stack: Stack
    open_host: HostOpener
    now: datetime
    cloud: CloudInfo = field(default_factory=CloudInfo)
    progress: Progress = field(default_factory=Silent)
    on_event: Callable[[Event], None] = _ignore
    on_log: Callable[[str], None] = _ignore
    make_launcher: LauncherFactory = HeadLauncher


@dataclass(frozen=True)
class JobResult:
    """How a job ended. ``record.exit_code`` is that of the rank that failed first."""

    record: JobRecord
    exit_code: int
    output: JobOutput
    plan: JobPlan

    def last_event(self, kind: str) -> Event | None:
        """Return the last event of that kind that the job reported."""
        return next((e for e in reversed(self.output.events) if e["event"] == kind), None)


@dataclass
class JobSession:
    """A complete, idle cluster on which jobs can run. ``paths`` are those of the job's folder."""

    context: JobContext
    head: Host
    launcher: Launcher
    paths: JobPaths
    _facts: dict[str, HostFacts] = field(default_factory=dict)

    def facts(self, nodes: int | None = None) -> dict[str, HostFacts]:
        """Return the facts of the first ``nodes`` nodes, or all, by name. Each node is inspected once."""
        cluster = self.context.cluster.first(nodes)
        unknown = [node for node in cluster.nodes if node.name not in self._facts]
        hint = f"`spr-cluster repair {cluster.flags}` replaces nodes that don't answer"
        hosts = [self.context.open_host(node) for node in unknown]
        self._facts |= on_all("inspecting the nodes", hosts, gather_facts, hint=hint)
        return {node.name: self._facts[node.name] for node in cluster.nodes}

    def plan_placement(
        self, options: PlacementOptions, backend: str, nodes: int | None = None
    ) -> Placement:
        """Assign ranks to the cores of the first ``nodes`` nodes. Raises :class:`UsageError`."""
        cluster = self.context.cluster.first(nodes)
        addresses = {node.name: node.private_ip for node in cluster.nodes}
        return plan_placement(self.facts(nodes), addresses, options, backend)

    def place(self, plan: JobPlan, placement: Placement | None = None) -> None:
        """Send the plan's files and the worker code to its nodes."""
        if plan.resumed_job:
            # A node that was replaced has no files.
            count = len(self.context.cluster.first(plan.nodes).nodes)
            files.place_again(self.head, self.paths, count)
            return
        if plan.sends:
            self.context.progress.note(f"sending {plan.sends}")
        sent: dict[str, Path | bytes] = {**files.worker_files(), **plan.files, "output/.keep": b""}
        if plan.gather_output:
            nodes = len(self.context.cluster.first(plan.nodes).nodes)
            sent[GATHER] = str(nodes).encode()
        if plan.resume_command and placement:
            sent[MANIFEST] = self._manifest(plan, placement).render()
        files.place_files(self.head, self.paths, sent, plan.nodes)

    def _manifest(self, plan: JobPlan, placement: Placement) -> JobManifest:
        nodes = len(self.context.cluster.first(plan.nodes).nodes)
        per_node = placement.ranks.nproc_per_node
        return JobManifest(plan.argv, nodes, per_node, plan.placement, plan.env)

    def command(self, plan: JobPlan, placement: Placement) -> LaunchCommand:
        cluster = self.context.cluster.first(plan.nodes)
        return build_launch_command(plan, placement, self.paths, cluster, self.context.stack)

    def run(self, plan: JobPlan, placement: Placement, *, quiet: bool = False) -> JobResult:
        """Run a job whose files are placed until it ends; a failure is a result, too.

        Ctrl-C stops the job on all nodes; a closed terminal does not. ``quiet`` does not show its log.
        """
        context, command = self.context, self.command(plan, placement)
        output = JobOutput(context.on_event, context.on_log, quiet)
        record = self._record(plan, placement, command)
        recorder = Recorder(plan.results, record)
        recorder.begin()
        try:
            code = run_command(self.launcher, command, self.paths, output, plan.stop_seconds)
        except HangupError:
            raise
        except KeyboardInterrupt:
            if plan.resume_command:
                with suppress(OSError, HostError):
                    context.on_log(self.how_to_resume(plan))
            raise
        return JobResult(recorder.end(output.first_exit_code(code)), code, output, plan)

    def _record(self, plan: JobPlan, placement: Placement, command: LaunchCommand) -> JobRecord:
        context, argv = self.context, plan.recorded_command
        cluster, stack = context.cluster.first(plan.nodes), context.stack
        return JobRecord(
            job=self.paths.job_id,
            kind=self.paths.job_id.partition("-")[0],
            cluster=cluster.name,
            **asdict(context.cloud),
            command=shlex.join(argv),
            argv=argv,
            mpirun=str(command),
            nodes=tuple(node.as_dict() for node in cluster.nodes),
            placement=describe_placement(placement, plan.backend),
            stack=stack.name,
            packages=stack.python_packages,
            when=context.now.isoformat(timespec="seconds"),
            more=plan.details,
        )

    def bring_home(self, plan: JobPlan) -> None:
        """Fetch the job's output, log, and metrics into the plan's results folder."""
        assert plan.results is not None
        context = self.context
        files.fetch(self.head, self.paths, plan.results, context.on_log, context.cluster.flags)

    def checkpoint(self) -> str:
        """Return the name of the job's newest checkpoint, "" if there is none."""
        return {job.job: job.checkpoint for job in list_jobs(self.head)}.get(self.paths.job_id, "")

    def how_to_resume(self, plan: JobPlan) -> str:
        """Return one line that names the checkpoint and the command that resumes the job."""
        job = self.paths.job_id
        words = [*plan.resume_command, job, *self.context.cluster.flags.split()]
        if plan.results and plan.results != Path("results", job):
            words += ["--results", str(plan.results)]
        kept = self.checkpoint()
        state = f"checkpoint {kept} is saved" if kept else "there is no checkpoint yet"
        return f"{state}; to resume the job: {shlex.join(words)}"


PlanBuilder = Callable[[JobSession], JobPlan]


def open_session(context: JobContext, job_id: str) -> JobSession:
    """Open a session for one job folder.

    Raises :class:`JobError` if nodes are missing, :class:`UsageError` if another job is running.
    """
    head = context.open_host(context.cluster.head)
    _require_all_nodes(context.cluster)
    launcher = context.make_launcher(head, context.cluster.flags)
    busy = launcher.running_job()
    if busy:
        raise job_is_running(busy, context.cluster.flags)
    return JobSession(context, head, launcher, JobPaths(job_id))


def run_job(context: JobContext, kind: str, build_plan: PlanBuilder) -> JobResult:
    """Run one job from its plan to its results.

    ``build_plan`` is called with a complete, idle cluster, so a plan may depend on what its nodes are.
    Raises :class:`JobError` if the job fails. Ctrl-C stops the job on all nodes.
    """
    job_id = new_job_id(kind, context.now)
    with context.progress.phase("Prepare the job"):
        session = open_session(context, job_id)
        plan = build_plan(session)
        if plan.resumed_job:
            session.paths = JobPaths(plan.resumed_job)
        context.progress.note(session.paths.job_id)
        placement = session.plan_placement(plan.placement, plan.backend, plan.nodes)
        session.place(plan, placement)
    nodes = len(context.cluster.first(plan.nodes).nodes)
    with context.progress.phase(f"{plan.title} on {counted(nodes, 'node')}"):
        result = session.run(plan, placement)
    if plan.results:
        with context.progress.phase("Fetch the results"):
            session.bring_home(plan)
    _require_success(session, plan, result)
    return result


def _require_success(session: JobSession, plan: JobPlan, result: JobResult) -> None:
    job = session.paths.job_id
    if result.exit_code == STOPPED and plan.resume_command:
        raise JobError(f"job {job} was stopped", hint=session.how_to_resume(plan))
    if result.exit_code != 0:
        log = f"{plan.results / 'log'}" if plan.results else f"{session.paths.log} on node0"
        hint = f"the whole log is {log}"
        if plan.resume_command and session.checkpoint():
            hint += f"; {session.how_to_resume(plan)}"
        raise explain(result.exit_code, result.output, hint)


def _require_all_nodes(cluster: Cluster) -> None:
    """Require every node: mpirun would wait forever for one that is gone."""
    if cluster.is_whole:
        return
    is_missing = len(cluster.nodes) != cluster.wanted_nodes
    state = f"{len(cluster.nodes)} of {counted(cluster.wanted_nodes, 'node')} running"
    raise JobError(
        f"cluster {cluster.name} is degraded: "
        + (state if is_missing else "its nodes are not connected yet"),
        hint=f"`spr-cluster repair {cluster.flags}` replaces and connects them, "
        f"`spr-cluster status {cluster.flags}` shows them",
    )
