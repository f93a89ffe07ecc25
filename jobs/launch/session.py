"""Running jobs: the only module that checks the cluster, inspects nodes, places files, submits, and records.

:func:`run_job` runs one job from its plan to its results. A study that makes several short runs opens a
:class:`JobSession` itself and places the files once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from cluster.nodes import Cluster, HostOpener
from infra.errors import HangupError, JobError
from infra.progress import Progress, Silent
from infra.words import counted
from jobs.launch import files
from jobs.launch.ending import CANCELLED, SUCCEEDED, JobEnd, Outcome
from jobs.launch.follow import (
    Event,
    JobOutput,
    explain,
    follow_job,
    how_to_come_back,
    stop_and_say,
)
from jobs.launch.history import list_jobs
from jobs.launch.manifest import JobManifest
from jobs.launch.mpirun import LaunchCommand, build_launch_command
from jobs.launch.placement import Placement, plan_placement
from jobs.launch.plan import GATHER, MANIFEST, JobPaths, JobPlan, PlacementOptions, new_job_id
from jobs.launch.queue import Launcher, LauncherFactory, SlurmLauncher
from jobs.launch.record import FILE as RECORD
from jobs.launch.record import CloudInfo, JobRecord, Recorder, describe_placement
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
    make_launcher: LauncherFactory = SlurmLauncher
    detach: bool = False
    """Leave the job to the cluster as soon as it is in the queue."""
    outcome: Outcome = field(default_factory=Outcome)


@dataclass(frozen=True)
class JobResult:
    """How a job ended, and what it printed."""

    record: JobRecord
    end: JobEnd
    output: JobOutput
    plan: JobPlan

    def last_event(self, kind: str) -> Event | None:
        """Return the last event of that kind that the job reported."""
        return next((e for e in reversed(self.output.events) if e["event"] == kind), None)


class DetachedError(Exception):
    """Raised instead of following a job that was submitted."""

    def __init__(self, job: str, flags: str) -> None:
        super().__init__(job)
        self.job, self.flags = job, flags


@dataclass(frozen=True)
class SubmittedJob:
    """A job in the queue: how it starts, and its record."""

    plan: JobPlan
    command: LaunchCommand
    recorder: Recorder


@dataclass
class JobSession:
    """A complete cluster on which jobs can run. ``paths`` are those of the job's folder."""

    context: JobContext
    head: Host
    launcher: Launcher
    paths: JobPaths
    _facts: dict[str, HostFacts] = field(default_factory=dict)

    def facts(self) -> dict[str, HostFacts]:
        """Return the facts of the nodes by name. Each node is inspected once."""
        if not self._facts:
            cluster = self.context.cluster
            hint = f"`spr-cluster repair {cluster.flags}` replaces nodes that don't answer"
            hosts = [self.context.open_host(node) for node in cluster.nodes]
            self._facts |= on_all("inspecting the nodes", hosts, gather_facts, hint=hint)
        return self._facts

    def plan_placement(self, options: PlacementOptions, backend: str) -> Placement:
        """Assign ranks to the cores of every node: the queue decides on which ones a job runs.

        Raises :class:`UsageError`.
        """
        addresses = {node.name: node.private_ip for node in self.context.cluster.nodes}
        return plan_placement(self.facts(), addresses, options, backend)

    def place(self, plan: JobPlan, placement: Placement | None = None) -> None:
        """Send the plan's files and the worker code to the nodes."""
        if plan.resumed_job:
            # A node that was replaced has no files.
            files.place_again(self.head, self.paths)
            return
        if plan.sends:
            self.context.progress.note(f"sending {plan.sends}")
        sent: dict[str, Path | bytes] = {**files.worker_files(), **plan.files, "output/.keep": b""}
        if plan.gather_output:
            sent[GATHER] = b""
        if placement:
            sent[RECORD] = self._record(plan, placement).render().encode()
        if plan.resume_command and placement:
            sent[MANIFEST] = self._manifest(plan, placement).render()
        files.place_files(self.head, self.paths, sent)

    def _manifest(self, plan: JobPlan, placement: Placement) -> JobManifest:
        nodes = len(self.context.cluster.first(plan.nodes).nodes)
        per_node = placement.ranks.nproc_per_node
        return JobManifest(plan.argv, nodes, per_node, plan.placement, plan.env)

    def command(self, plan: JobPlan, placement: Placement) -> LaunchCommand:
        """Return how a job starts. Raises :class:`UsageError` if the cluster has too few nodes."""
        context = self.context
        return build_launch_command(plan, placement, self.paths, context.cluster, context.stack)

    def submit(self, plan: JobPlan, placement: Placement) -> SubmittedJob:
        """Put a job whose files are placed into the queue, and write its record."""
        command = self.command(plan, placement)
        recorder = Recorder(plan.results, self._record(plan, placement))
        recorder.begin()
        self.launcher.submit(command, self.paths)
        return SubmittedJob(plan, command, recorder)

    def follow(self, job: SubmittedJob, *, quiet: bool = False) -> JobResult:
        """Show a job until it ends; a failure is a result, too. ``quiet`` does not show its log."""
        context = self.context
        output = JobOutput(context.on_event, context.on_log, quiet)
        for line in (*(f"warning: {text}" for text in job.command.warnings), f"$ {job.command}"):
            if not quiet:
                output.show(line)
        end = follow_job(self.launcher, self.paths, output)
        name, results = self.paths.job_id, job.plan.results
        context.outcome.end(name, end, results)
        with files.say_how_to_fetch(name, results or Path(), context.cluster.flags):
            record = job.recorder.end(end)
        return JobResult(record, end, output, job.plan)

    def follow_or_stop(self, job: SubmittedJob, *, quiet: bool = False) -> JobResult:
        """Show a job of which nobody else needs the result: Ctrl-C ends it."""
        try:
            return self.follow(job, quiet=quiet)
        except HangupError:
            raise
        except KeyboardInterrupt:
            stop_and_say(self.launcher, self.paths, job.plan.stop_seconds, self.context.on_log)
            raise

    def _record(self, plan: JobPlan, placement: Placement) -> JobRecord:
        context, argv = self.context, plan.recorded_command
        cluster, stack = context.cluster, context.stack
        return JobRecord(
            job=self.paths.job_id,
            kind=self.paths.job_id.partition("-")[0],
            cluster=cluster.name,
            **asdict(context.cloud),
            command=shlex.join(argv),
            argv=argv,
            mpirun=str(self.command(plan, placement)),
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
        flags = context.cluster.flags
        missing = files.fetch(self.head, self.paths, plan.results, context.on_log, flags)
        context.outcome.come_home(missing)

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
    """Open a session for one job folder. Raises :class:`JobError` if nodes are missing."""
    head = context.open_host(context.cluster.head)
    _require_all_nodes(context.cluster)
    launcher = context.make_launcher(head, context.cluster.flags)
    return JobSession(context, head, launcher, JobPaths(job_id))


def run_job(context: JobContext, kind: str, build_plan: PlanBuilder) -> JobResult:
    """Run one job from its plan to its results.

    ``build_plan`` is called with a complete cluster, so a plan may depend on what its nodes are.
    Raises :class:`JobError` if the job fails, :class:`DetachedError` if it is not to be followed.
    Ctrl-C ends only the following.
    """
    job_id = new_job_id(kind, context.now)
    with context.progress.phase("Prepare the job"):
        session = open_session(context, job_id)
        plan = build_plan(session)
        if plan.resumed_job:
            session.paths = JobPaths(plan.resumed_job)
        context.progress.note(session.paths.job_id)
        placement = session.plan_placement(plan.placement, plan.backend)
        session.place(plan, placement)
        job = session.submit(plan, placement)
    if context.detach:
        raise DetachedError(session.paths.job_id, context.cluster.flags)
    nodes = len(context.cluster.first(plan.nodes).nodes)
    with context.progress.phase(f"{plan.title} on {counted(nodes, 'node')}"):
        if plan.results:
            with say_how_to_come_back(context, session.paths):
                result = session.follow(job)
        else:
            result = session.follow_or_stop(job)
    if plan.results:
        with context.progress.phase("Fetch the results"):
            session.bring_home(plan)
    _require_success(session, plan, result)
    return result


@contextmanager
def say_how_to_come_back(context: JobContext, paths: JobPaths) -> Iterator[None]:
    """After Ctrl-C, or when the terminal is closed, say how to see and how to end the job that goes on."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):
            context.on_log(how_to_come_back(paths.job_id, context.cluster.flags))
        raise


def _require_success(session: JobSession, plan: JobPlan, result: JobResult) -> None:
    job, end = session.paths.job_id, result.end
    if end.state == SUCCEEDED:
        return
    if end.state == CANCELLED:
        hint = session.how_to_resume(plan) if plan.resume_command else None
        raise JobError(f"job {job} was cancelled", hint=hint)
    log = f"{plan.results / 'log'}" if plan.results else f"{session.paths.log} on node0"
    hint = f"the whole log is {log}"
    if plan.resume_command and session.checkpoint():
        hint += f"; {session.how_to_resume(plan)}"
    raise explain(end, result.output, hint)


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
