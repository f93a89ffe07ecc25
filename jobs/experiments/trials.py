"""Trials: runs of a training job for some seconds each, which measure its speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from infra.errors import JobError, UsageError
from jobs.experiments.trial_grid import TrialResult
from jobs.launchers.job_state import CANCELLED
from jobs.launchers.plan import PlacementOptions, new_job_id
from jobs.launchers.queue.job_output import Event, explain
from jobs.launchers.queue.session import JobContext, JobSession, open_session
from jobs.train.request import TrainRequest
from jobs.train.train import plan_training
from jobs.worker.supervisor.attempt import SUCCEEDED
from jobs.worker.training.options import TrainOptions


@dataclass(frozen=True)
class TrialSeries:
    """Trials of one training job, which share a session and the files on the nodes."""

    session: JobSession
    training: TrainRequest
    seconds: int

    def run(
        self,
        options: TrainOptions,
        placement: PlacementOptions,
        title: str,
        nodes: int | None = None,
    ) -> TrialResult:
        """Run one trial on ``nodes`` nodes. A failure is a result, too.

        Raises :class:`JobError` if the trial was cancelled: that ends the series.
        """
        progress = self.session.context.progress
        with progress.phase(title):
            request = replace(
                self.training,
                options=replace(options, trial_seconds=self.seconds),
                placement=placement,
                nodes=nodes or self.training.nodes,
            )
            done = self._run(request)
            speed = done.samples_per_second
            progress.note(f"failed: {done.failure}" if speed is None else f"{speed:.1f} samples/s")
            return done

    def _run(self, request: TrainRequest) -> TrialResult:
        plan = replace(plan_training(request, self.session.context.stack), results=None)
        try:
            placed = self.session.plan_placement(plan.placement, plan.backend)
        except UsageError as error:
            return TrialResult(failure=error.message)
        plan = replace(plan, resume_command=())
        record = self.session.submit(plan, placed)
        result = self.session.follow(plan, record, quiet=True)
        if result.end.state == CANCELLED:
            raise JobError(f"job {result.record.job} was cancelled")
        done = TrialResult(placed.nproc_per_node, placed.omp_threads)
        trial = result.last_event("trial")
        if result.end.state != SUCCEEDED or trial is None:
            return replace(done, failure=explain(result.end, result.output, "").message)
        return replace(
            done,
            samples_per_second=float(trial["samples_per_second"]),
            step_s=float(trial["seconds"]) / max(int(trial["steps"]), 1),
            gradient_bytes=int(trial["gradient_bytes"]),
        )


def open_trials(
    context: JobContext,
    kind: str,
    training: TrainRequest,
    seconds: int,
    check: Callable[[JobSession], None],
) -> TrialSeries:
    """Check the cluster and place the files of a series of trials.

    ``check`` receives the session before anything is sent, and may raise.
    """

    def on_event(event: Event) -> None:
        if event["event"] == "phase":
            context.progress.note(event["name"])

    job_id = new_job_id(kind, context.now)
    with context.progress.phase(f"Prepare {job_id}"):
        session = open_session(replace(context, on_event=on_event), job_id)
        session.facts()
        check(session)
        session.place(replace(plan_training(training, context.stack), resume_command=()))
    return TrialSeries(session, training, seconds)


def all_failed(session: JobSession, failures: list[str]) -> JobError:
    """Return the error for a series in which every trial failed; equal failures appear once."""
    return JobError(
        f"every trial failed: {'; '.join(dict.fromkeys(failures))}",
        hint=f"the last log is {session.paths.log} on node0",
    )
