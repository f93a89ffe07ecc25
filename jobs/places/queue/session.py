"""Run jobs: check the cluster, inspect its nodes, copy files, submit, follow, and record.

:func:`run_job` runs one job from plan to results. A study of several short runs opens a
:class:`JobSession` itself and copies the files only once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.nodes import Cluster, HostOpener
from infra.errors import HangupError, HostError, JobError, SprError, UsageError
from infra.wait import Progress, Silent
from infra.words import counted, spoken_day
from jobs.places import files
from jobs.places.environment import warn_ignored
from jobs.places.expected import Expected, find_expected
from jobs.places.folders import send_folders
from jobs.places.launcher import CANCELLED, JobEnd, JobSummary, Outcome
from jobs.places.packages import install_packages
from jobs.places.placement import Placement, check_part, plan_placement
from jobs.places.plan import RECORD, STOP_SECONDS, JobPaths, JobPlan, new_job_id, own_folder
from jobs.places.queue.history import (
    ExpiryWatch,
    LostHeadError,
    describe_expiry,
    list_jobs,
    what_is_left,
)
from jobs.places.queue.job_output import (
    Event,
    JobOutput,
    explain,
    how_to_come_back,
    note_silence,
    stop_job,
)
from jobs.places.queue.slurm import SlurmLauncher, build_launch, render_command
from jobs.places.record import (
    CloudInfo,
    JobRecord,
    claim_results,
    read_record,
    release_results,
    results_option,
)
from jobs.worker.spec import Resources
from jobs.worker.supervisor.attempt import SUCCEEDED
from jobs.worker.supervisor.launch import Launch
from provision.facts import HostFacts, gather_facts
from provision.host import Host
from provision.run_on_nodes import on_all
from provision.stacks.stack import Stack


@dataclass(frozen=True)
class JobContext:
    """What every job needs: the cluster, its software stack, and where to report progress."""

    cluster: Cluster
    stack: Stack
    open_host: HostOpener
    now: datetime
    cloud: CloudInfo = field(default_factory=CloudInfo)
    progress: Progress = field(default_factory=Silent)
    on_event: Callable[[Event], None] = lambda _: None
    on_log: Callable[[str], None] = lambda _: None
    detach: bool = False
    """Return as soon as the job is in the queue."""
    outcome: Outcome = field(default_factory=Outcome)
    find_ssh_config: Callable[[], Path] = Path
    """OpenSSH's configuration for the nodes."""
    keep_limit: Callable[[JobPlan, float], JobPlan] = lambda plan, _: plan
    """Sets the job's time limit, and moves the nodes' end for it; called just before its submission.

    The second argument is how many seconds it needs at least.
    """
    find_expiry: Callable[[], datetime | None] = lambda: None
    """Reads from EC2 when the nodes will shut down."""
    find_job_end: Callable[[], datetime | None] = lambda: None
    """The same for a job with a limit, for which they stay."""
    is_gone: Callable[[], bool] = lambda: False
    """Asks EC2 whether no node of the cluster is left."""
    count_former_s: Callable[[datetime | None], float] = lambda _: 0.0
    """Returns the seconds that machines which the cluster no longer has ran after a time, or ever."""
    add_receipt: Callable[[Path], Mapping[str, Any]] = lambda _: {}
    """Adds the receipt to fetched results, also of a failed job; returns what it added."""


@dataclass(frozen=True)
class JobResult:
    """A job's outcome and output."""

    record: JobRecord
    end: JobEnd
    output: JobOutput
    plan: JobPlan

    def last_event(self, kind: str) -> Event | None:
        """Return the last event of one kind."""
        return next((e for e in reversed(self.output.events) if e["event"] == kind), None)


@dataclass
class DetachedError(Exception):
    """The job was submitted and is not followed."""

    job: str
    flags: str


@dataclass
class JobSession:
    """A complete cluster on which jobs can run. ``paths`` are those of the job's folder."""

    context: JobContext
    launcher: SlurmLauncher
    paths: JobPaths
    unused: Mapping[str, Any] = field(default_factory=dict)
    """What the cluster cost before the job, as in its record."""
    before: JobSummary | None = None
    """The job that is resumed, as its last run left it."""
    _facts: dict[str, HostFacts] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        return self.launcher.head

    def facts(self) -> dict[str, HostFacts]:
        """Return the facts of the nodes by name. Each node is inspected once."""
        if not self._facts:
            cluster = self.context.cluster
            hint = f"`spr-cluster repair {cluster.flags}` replaces nodes that don't answer"
            hosts = [self.context.open_host(node) for node in cluster.nodes]
            self._facts |= on_all("inspecting the nodes", hosts, gather_facts, hint=hint)
        return self._facts

    def share_of(self, resources: Resources) -> float:
        """Return the share of each node's price that a job pays."""
        head = self.context.cluster.head.name
        return (
            resources.share_of(len(self.facts()[head].physical_cores)) if resources.cores else 1.0
        )

    def plan_placement(self, resources: Resources, backend: str) -> Placement:
        """Assign ranks to cores on every node, because the queue chooses the job's nodes.

        Raises :class:`UsageError`.
        """
        addresses = {node.name: node.private_ip for node in self.context.cluster.nodes}
        check_part(resources, self.facts())
        asked = resources.placement, backend, resources.cores
        found = plan_placement(self.facts(), addresses, *asked)
        ignored = warn_ignored(self.context.stack, found)
        return replace(found, warnings=(*found.warnings, *ignored))

    def place(self, plan: JobPlan) -> None:
        """Send the plan's folders, its files, and the worker code to the nodes.

        A failure leaves nothing there.
        """
        try:
            self._send_folders(plan)
            self._send_files(plan)
        except BaseException:
            self._withdraw(plan)
            raise

    def _send_folders(self, plan: JobPlan) -> None:
        context, packages = self.context, plan.packages
        note, environment = context.progress.note, context.cluster.environment

        def install() -> str:
            if not packages:
                return ""
            return install_packages(self.head, packages, context.stack, note, environment)

        if plan.folders or packages:
            ssh_config = context.find_ssh_config()
            send_folders(self.head, plan.folders, install, self.paths, ssh_config, note)

    def _send_files(self, plan: JobPlan, record: str = "") -> None:
        if plan.spec.recovery.resumed_job:
            files.check_places(self.head, self.paths, plan.spec.storage.bucket or "")
            return  # its first node sends them to replacement nodes
        if plan.sends:
            self.context.progress.note(f"sending {plan.sends}")
        sent = {**files.worker_files(), **plan.files}
        sent |= {RECORD: record.encode()} if record else {}
        files.place_files(self.head, self.paths, sent)
        files.place_head_folders(self.head, self.paths, plan.head_folders)
        files.check_stage(self.head, self.paths, (*plan.spec.storage.stage, *plan.reads))
        files.check_places(self.head, self.paths, plan.spec.storage.bucket or "", plan.writes)

    def describe(self, plan: JobPlan, placement: Placement) -> tuple[Launch, JobRecord]:
        """Return a job's launch and record. Raises :class:`UsageError` if the cluster has too few nodes."""
        cluster = self.context.cluster
        launch = build_launch(plan, placement, self.paths, cluster, self.context.stack)
        return launch, self._record(plan, placement, launch)

    def start(self, plan: JobPlan) -> JobRecord:
        """Copy a job's files to the nodes and submit it. Returns its record, also kept with its results.

        A job that can't be submitted leaves nothing behind, on the nodes or in its results folder.
        """
        is_new = is_submitted = False
        is_sent = bool(plan.folders or plan.packages)

        def send_files(inspecting: Future[Placement]) -> tuple[Launch, JobRecord]:
            nonlocal is_new, is_sent
            launch, record = self.describe(plan, inspecting.result())
            text = record.render()
            if plan.results:
                is_new = claim_results(plan.results, self.paths.job_id, text)
            is_sent = True
            self._send_files(plan, text)
            return launch, record

        try:
            # The folders are sent while the nodes are inspected and get the files.
            pool = ThreadPoolExecutor(1)
            inspecting = pool.submit(self.plan_placement, plan.spec.resources, plan.backend)
            sending = pool.submit(send_files, inspecting)
            try:
                self._send_folders(plan)
                launch, record = sending.result()
            except BaseException as error:
                sending.cancel()  # if the nodes are still being inspected
                if isinstance(error, SprError):
                    inspecting.result()  # its error says best why a node does not answer
                raise
            finally:
                if not sending.done():
                    self.head.close()  # which ends it
                    wait([sending])
                # Ctrl-C must not wait for nodes that don't answer.
                pool.shutdown(wait=False)
            is_submitted = True
            if self.before:
                first = read_record(self.head, self.paths)
                text = first.resumed_as(record, self.before).render()
                self.head.put(text.encode(), self.paths.uploaded(RECORD))
            self.launcher.submit(launch, self.paths, plan.variables)
        except BaseException:
            is_over = (is_sent and self._withdraw(plan)) or not is_submitted
            if plan.results and is_new and is_over:
                release_results(plan.results)
            raise
        return record

    def _withdraw(self, plan: JobPlan) -> bool:
        """Remove a job that was not submitted; return whether that is certain."""
        if plan.spec.recovery.resumed_job:
            return True
        self.head.close()  # after Ctrl-C, a command may still run in the connection
        with suppress(SprError):
            if files.withdraw_files(self.head, self.paths):
                return True
            self.context.on_log(how_to_come_back(self.paths.job_id, self.context.cluster.flags))
        return False

    def follow(self, plan: JobPlan, record: JobRecord, *, quiet: bool = False) -> JobResult:
        """Follow a job until it ends, also with a failure. ``quiet`` hides its log."""
        output = JobOutput(self.context.on_event, self.context.on_log, record.job, quiet)
        output.may_be_silent = plan.is_interactive
        warnings = (f"warning: {text}" for text in record.placement.warnings)
        for line in () if quiet else warnings:
            output.show(line)
        is_limited = plan.spec.ending.max_time_s > 0
        kept = record.bucket, record.resumable
        end = self.watch(output, plan.results, is_limited=is_limited, kept=kept)
        return JobResult(record.ended_as(end), end, output, plan)

    def watch(
        self, output: JobOutput, results: Path | None, *, is_limited: bool, kept: tuple[str, bool]
    ) -> JobEnd:
        """Show a job's output until it ends; then fetch its results into ``results``.

        ``kept`` is the bucket that stores the job, and whether it can be resumed from there.
        Ctrl-C stops only the following. Without ``results``, nobody else needs the job, so it ends as well.
        """
        job, on_log, context = self.paths.job_id, self.context.on_log, self.context
        flags, outcome = context.cluster.flags, context.outcome
        outcome.job = job
        expires, find = context.cluster.expires, context.find_expiry
        if is_limited:
            find = context.find_job_end
            expires = find() or expires
        expiry = ExpiryWatch(expires, flags, output.show, find)
        expiry.stored = f"{kept[0]}/{job}" if kept[0] else ""
        output.on_eta = expiry.see_eta
        try:
            with note_silence(output, tick=expiry.tick):
                sinks = (output.add, output.note_waiting, output.note_state)
                end = self.launcher.follow(self.paths, *sinks)
        except (JobError, HostError) as error:
            if isinstance(error, LostHeadError):
                known = job, flags, context.cloud.flag, kept
                error.hint = what_is_left(*known, is_gone=context.is_gone())
            raise (expiry.explain(job, error.message) or error) from None
        except KeyboardInterrupt as interrupt:
            self.head.close()
            if results:
                with suppress(OSError):
                    on_log(how_to_come_back(job, flags))
            elif not isinstance(interrupt, HangupError):
                stop_job(self.launcher, self.paths, STOP_SECONDS, on_log)
            raise
        outcome.state, outcome.results = end.state, results
        return end

    def show_estimate(self, plan: JobPlan) -> Expected:
        """Say what the nodes cost, and how long the same command took before.

        Warns if the nodes shut down earlier.
        """
        context, cluster = self.context, self.context.cluster
        resources = plan.spec.resources
        used, share = cluster.first(resources.nodes).nodes, self.share_of(resources)
        usd = context.cloud.usd_per_hour and context.cloud.usd_per_hour * len(used) * share
        if usd:
            part = f"{share:.1%} of " if share < 1 else ""
            context.on_log(
                f"{part}{counted(len(used), 'node')} for ${usd:.2f} an hour {context.cloud.market}"
            )
        listed, resumed = list_jobs(self.head), plan.spec.recovery.resumed_job
        self.unused = self._find_unused(listed, len(used))
        self.before = next((job for job in listed if job.job == resumed), None)
        if resumed:
            return Expected()
        asked = shlex.join(_argv(plan)), len(used), resources.cores
        done = {
            job.job: job.seconds + job.spent_s
            for job in listed
            if (job.command, len(job.nodes), job.cores) == asked
            and job.state == SUCCEEDED
            and job.seconds
        }
        expected = find_expected(*asked, used[0].instance.instance_type, done)
        if expected.seconds:
            context.on_log(expected.describe(usd))
        if expected.seconds and cluster.expires:
            watch = ExpiryWatch(
                cluster.expires, cluster.flags, context.on_log, now=lambda: context.now
            )
            watch.see_eta(expected.median_s)
        return expected

    def _find_unused(self, listed: Sequence[JobSummary], nodes: int) -> dict[str, float]:
        """Return what the cluster cost since the jobs before, or since its launch if there were none."""
        cluster, now = self.context.cluster, self.context.now
        launched = [node.instance.launch_time for node in cluster.nodes]
        # A job that came from S3 may have run on another cluster.
        here = [job for job in listed if (job.ended or job.began or job.submitted) >= launched[0]]
        since = max((job.ended for job in here if job.ended), default=None)
        if any(job.is_active for job in listed) or (here and not since):
            return {}
        waits = [(now - max(each, since or each)).total_seconds() for each in launched]
        waited = max(0.0, sum(waits) / len(waits))
        former_s = self.context.count_former_s(since) / nodes
        return {"idle_s" if since else "boot_s": waited, "former_s": former_s}

    def _record(self, plan: JobPlan, placement: Placement, launch: Launch) -> JobRecord:
        context = self.context
        argv, recovery = _argv(plan), plan.spec.recovery
        cluster, stack, resources = context.cluster, context.stack, plan.spec.resources
        kept = {"retries": recovery.retries, "least_nodes": recovery.least_nodes}
        return JobRecord(
            job=self.paths.job_id,
            kind=self.paths.job_id.partition("-")[0],
            cluster=cluster.name,
            **asdict(context.cloud),
            command=shlex.join(argv),
            argv=argv,
            mpirun=render_command(launch, cluster.head.private_ip),
            nodes=tuple(node.as_dict() for node in cluster.nodes),
            nnodes=len(cluster.first(resources.nodes).nodes),
            placement=placement,
            options=resources.placement,
            env=plan.env,
            resumable=bool(plan.resume_command),
            gather_output=plan.gather_output,
            stack=stack.name,
            packages=stack.python_packages,
            bucket=plan.spec.storage.bucket or "",
            cores=resources.cores,
            memory_gib=resources.memory_gib,
            node_share=self.share_of(resources),
            when=context.now.isoformat(timespec="seconds"),
            **self.unused,
            more={
                **plan.details,
                **({"results": str(plan.results)} if plan.results else {}),
                **({"stage": plan.spec.storage.stage} if plan.spec.storage.stage else {}),
                **({"recovery": kept} if plan.resume_command else {}),
            },
        )

    def bring_home(self, results: Path) -> None:
        """Fetch the job's output, log, and metrics into a folder."""
        context = self.context
        with context.progress.phase("Fetch the results"):
            flags, outcome = context.cluster.flags, context.outcome
            note = context.progress.note
            fetched = files.fetch(self.head, self.paths, results, note, flags)
            outcome.missing = fetched.missing
            for line in (*fetched.said, *fetched.missing):
                context.on_log(line)
            outcome.is_home = not outcome.missing
            context.add_receipt(results)

    def finish(
        self, end: JobEnd, output: JobOutput, results: Path | None, resume: Sequence[str] = ()
    ) -> None:
        """Fetch the results of a job that has ended. Raises :class:`JobError` unless it succeeded.

        ``resume`` is the command that resumes it, up to its ID; empty if it can't be resumed.
        """
        if results:
            self.bring_home(results)
        if end.state == SUCCEEDED:
            return
        job, is_canceled = self.paths.job_id, end.state == CANCELLED
        log = own_folder(results) / "log" if results else f"{self.paths.log} on node0"
        hint = f"the whole log is {log}"
        if resume:
            kept = next((at.checkpoint for at in list_jobs(self.head) if at.job == job), None)
            if kept:
                command = f"{shlex.join([*resume, job])} {self.context.cluster.flags}"
                command += results_option(job, results)
                how = f"checkpoint {kept} is saved; to resume the job: {command}"
                hint = how if is_canceled else f"{hint}; {how}"
            elif is_canceled:
                hint = f"it had no checkpoint yet, so there is nothing to resume; {hint}"
        if is_canceled:
            raise JobError(f"job {job} was canceled", hint=hint)
        raise explain(end, output, hint)


def _argv(plan: JobPlan) -> tuple[str, ...]:
    return plan.command or ("python", "-m", plan.module, *plan.argv)


def open_session(context: JobContext, job_id: str = "", *, starts: bool = True) -> JobSession:
    """Open a session for one job folder. To start a job, raises :class:`JobError` if nodes are missing."""
    head = context.open_host(context.cluster.head)
    if starts:
        _require_all_nodes(context.cluster)
        if expires := context.cluster.expires:
            _require_time(context, expires)
            context.on_log(describe_expiry(expires, context.now, context.cluster.flags))
    return JobSession(context, SlurmLauncher(head, context.cluster.flags), JobPaths(job_id))


def _require_time(context: JobContext, expires: datetime) -> None:
    if context.now < expires or context.now < (context.find_expiry() or expires):
        return
    cluster = context.cluster
    raise JobError(
        f"the time to live of cluster {cluster.name!r} was over at "
        f"{spoken_day(expires, context.now.date())}: its nodes accept no new jobs",
        hint=f"to keep using them, if they still exist: spr-cluster extend 2h {cluster.flags}",
    )


def run_job(context: JobContext, build_plan: Callable[[JobSession], JobPlan]) -> JobResult:
    """Run one job from its plan to its results.

    ``build_plan`` is called with a complete cluster, so a plan may depend on what its nodes are.
    Raises :class:`JobError` if the job fails, :class:`DetachedError` if it should not be followed.
    See :meth:`JobSession.watch` for Ctrl-C.
    """
    with context.progress.phase("Prepare the job"):
        session = open_session(context)
        plan = with_bucket(build_plan(session), context.cluster)
        session.paths = JobPaths(
            plan.spec.recovery.resumed_job or new_job_id(plan.kind, context.now)
        )
        context.progress.note(session.paths.job_id)
        expected = session.show_estimate(plan)
        share = session.share_of(plan.spec.resources)
        ending = replace(plan.spec.ending, node_share=share)
        plan = replace(plan, spec=replace(plan.spec, ending=ending))
        plan = context.keep_limit(plan, expected.preparation_s)
        record = session.start(plan)
        if plan.spec.ending.down_when_done:
            context.on_log(
                f"when the job has ended and is in {plan.spec.storage.bucket}, all nodes power off; if it "
                "can't be stored, they wait until their time to live and grace are over"
            )
    if context.detach:
        raise DetachedError(session.paths.job_id, context.cluster.flags)
    nodes = len(context.cluster.first(plan.spec.resources.nodes).nodes)
    title = f"{plan.title} on {counted(nodes, 'node')}"
    with suppress(_UnsuccessfulError), context.progress.phase(title):
        result = session.follow(plan, record)
        if result.end.state != SUCCEEDED:
            raise _UnsuccessfulError
    session.finish(result.end, result.output, plan.results, plan.resume_command)
    return result


def with_bucket(plan: JobPlan, cluster: Cluster) -> JobPlan:
    """Return the plan with the cluster's bucket, unless it has its own. Raises :class:`UsageError`."""
    spec = plan.spec
    bucket = cluster.bucket if spec.storage.bucket is None else spec.storage.bucket
    if spec.ending.down_when_done and not bucket:
        raise UsageError(
            "--detach --down-when-done needs a bucket: without one, the results would end with the nodes",
            hint="create the cluster with `up --bucket s3://…`, or omit --detach and keep this machine on",
        )
    storage = replace(spec.storage, bucket=bucket.rstrip("/"))
    return replace(plan, spec=replace(spec, storage=storage))


def attach(context: JobContext, found: JobSummary, results: Path) -> JobEnd:
    """Follow a job that another command submitted, from the start of its output; fetch its results.

    Raises :class:`JobError` if it fails. Ctrl-C stops only the following.
    """
    job, kept = found.job, (found.bucket, found.unfinished)
    session = open_session(context, job, starts=False)
    output = JobOutput(context.on_event, context.on_log, job)
    with suppress(_UnsuccessfulError), context.progress.phase(f"Follow {job}"):
        end = session.watch(output, results, is_limited=found.max_time_s > 0, kept=kept)
        if end.state != SUCCEEDED:
            raise _UnsuccessfulError
    session.finish(end, output, results)
    return end


class _UnsuccessfulError(Exception):
    """Ends the phase of a failed job, so that its results are fetched before its error is reported."""


def _require_all_nodes(cluster: Cluster) -> None:
    """Require every node: mpirun would wait forever for one that is gone."""
    if cluster.is_whole:
        return
    cluster.require_connected()
    state, verb = "not all of its nodes are connected yet", "up"
    if len(cluster.nodes) != cluster.wanted_nodes:
        state = f"{len(cluster.nodes)} of {counted(cluster.wanted_nodes, 'node')} running"
        verb = "repair"
    raise JobError(
        f"cluster {cluster.name} is degraded: {state}",
        hint=f"`spr-cluster {verb} {cluster.flags}` replaces and connects them, "
        f"`spr-cluster status {cluster.flags}` shows them",
    )
