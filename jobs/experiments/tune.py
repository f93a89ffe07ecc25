"""``tune``: short trials of a training job over a grid; later jobs use the fastest placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from infra.ec2.tags import render_time
from infra.errors import JobError, UsageError
from jobs.places.launcher import CANCELLED
from jobs.places.placement import even_splits, no_ccl_workers
from jobs.places.plan import new_job_id
from jobs.places.queue.job_output import Event, explain
from jobs.places.queue.session import JobContext, JobSession, open_session
from jobs.train.request import TrainRequest, require_able_stack
from jobs.train.train import plan_training
from jobs.train.tuned import TuningResult, save_tuned, tuning_key
from jobs.worker.spec import PlacementOptions
from jobs.worker.supervisor.attempt import SUCCEEDED
from jobs.worker.training.options import TrainOptions
from provision.facts import HostFacts

MAX_TRIALS = 64
START_UP_S = 30
"""Approximate start-up of a trial: ranks start, load the model, and read the data."""


@dataclass(frozen=True)
class TrialGrid:
    """The values to try; ``None`` derives them from the nodes. ``batch_sizes`` are per rank."""

    ppn: tuple[int, ...] | None
    ccl_workers: tuple[int, ...] | None
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One placement and batch size of the ranks; ``ccl_workers`` is 0 without oneCCL."""

    nproc_per_node: int
    ccl_workers: int
    batch_size: int

    def __str__(self) -> str:
        workers = f", {self.ccl_workers} oneCCL workers" if self.ccl_workers else ""
        return f"{self.nproc_per_node} per node{workers}, batch {self.batch_size}"


@dataclass(frozen=True)
class TrialResult:
    """The speed of a trial: features per second of all ranks and seconds per step, or why it failed.

    ``nproc_per_node`` is the number of ranks per node, ``threads`` that of a rank's computing threads,
    ``gradient_bytes`` what a rank exchanges per step.
    """

    nproc_per_node: int | None = None
    threads: int | None = None
    samples_per_second: float | None = None
    step_s: float | None = None
    gradient_bytes: int = 0
    failure: str = ""


def plan_trials(grid: TrialGrid, facts: Iterable[HostFacts], backend: str) -> tuple[Trial, ...]:
    """Return every combination, starting with the nodes' default.

    Raises :class:`UsageError` for more than :data:`MAX_TRIALS`, and for workers without oneCCL.
    """
    workers = _workers(grid, backend)
    trials = tuple(
        Trial(ppn, count, batch)
        for ppn in grid.ppn or suggest_ppn(facts, min(workers))
        for count in workers
        for batch in grid.batch_sizes
    )
    if len(trials) > MAX_TRIALS:
        raise UsageError(
            f"{len(trials)} trials: expected at most {MAX_TRIALS}",
            hint="give shorter lists: the trials are all combinations of them",
        )
    return trials


def _workers(grid: TrialGrid, backend: str) -> tuple[int, ...]:
    if backend == "ccl":
        return grid.ccl_workers or (1, 2)
    if grid.ccl_workers:
        raise no_ccl_workers(backend)
    return (0,)


def suggest_ppn(facts: Iterable[HostFacts], workers: int) -> tuple[int, ...]:
    """Return ranks per node to try: one per NUMA node (the default), one, and two and four per NUMA node.

    Only numbers that divide every node's cores evenly and leave at least one core for computing.
    """
    nodes = list(facts)
    numa = min(len(fact.numa_nodes) for fact in nodes)
    fitting = set.intersection(*(set(even_splits(fact)) for fact in nodes))
    cores = min(len(fact.physical_cores) for fact in nodes)
    candidates = dict.fromkeys((numa, 1, 2 * numa, 4 * numa))
    return tuple(n for n in candidates if n in fitting and cores // n > workers) or (1,)


def estimate_minutes(trials: int, seconds: float) -> float:
    """Estimate the duration of the trials, including start-up."""
    return trials * (seconds + START_UP_S) / 60


def choose_best(results: Mapping[Trial, TrialResult]) -> Trial | None:
    """Return the fastest trial, the first of equal ones; ``None`` if all failed."""
    speeds = {
        t: r.samples_per_second for t, r in results.items() if r.samples_per_second is not None
    }
    return max(speeds, key=lambda trial: speeds[trial], default=None)


def as_row(trial: Trial, result: TrialResult) -> Mapping[str, object]:
    """Return a trial and its result for ``--json``."""
    return {
        "ppn": trial.nproc_per_node,
        "ccl_workers": trial.ccl_workers,
        "threads": result.threads,
        "batch_size": trial.batch_size,
        "samples_per_second": result.samples_per_second,
        "failure": result.failure,
    }


@dataclass(frozen=True)
class TrialSeries:
    """Trials of one training job; they share a session and the files on the nodes."""

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
        """Run one trial on ``nodes`` nodes. A failure is also a result.

        Raises :class:`JobError` if the trial was canceled, which ends the series.
        """
        progress = self.session.context.progress
        with progress.phase(title):
            nodes = nodes or self.training.spec.resources.nodes
            trial = replace(options, trial_seconds=self.seconds)
            done = self._run(self.training.change(trial, placement, nodes))
            speed = done.samples_per_second
            progress.note(f"failed: {done.failure}" if speed is None else f"{speed:.1f} samples/s")
            return done

    def _run(self, request: TrainRequest) -> TrialResult:
        plan = replace(plan_training(request, self.session.context.stack), results=None)
        try:
            placed = self.session.plan_placement(request.placement, plan.backend)
        except UsageError as error:
            return TrialResult(failure=error.message)
        plan = replace(plan, resume_command=())
        launch, record = self.session.describe(plan, placed)
        self.session.submit(plan, launch)
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
    """Check the cluster and send the files of a series of trials.

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
        plan = plan_training(training, context.stack)
        session.place(replace(plan, resume_command=(), variables=()))
    return TrialSeries(session, training, seconds)


def all_failed(session: JobSession, failures: list[str]) -> JobError:
    """Return the error for a series in which every trial failed; equal failures appear once."""
    return JobError(
        f"every trial failed: {'; '.join(dict.fromkeys(failures))}",
        hint=f"the last log is {session.paths.log} on node0",
    )


@dataclass(frozen=True)
class TuneRequest:
    """``training`` is the job to speed up; ``seconds`` is the length of each trial."""

    training: TrainRequest
    grid: TrialGrid
    seconds: int


def tune(
    context: JobContext, request: TuneRequest, on_plan: Callable[[tuple[Trial, ...]], None]
) -> tuple[TuningResult, dict[Trial, TrialResult]]:
    """Run every trial and keep the fastest on the head.

    ``on_plan`` receives the trials before the first one. Raises :class:`JobError` if none succeeds.
    Ctrl-C stops the current trial, and nothing is kept.
    """
    require_able_stack(context.stack, f"tune {request.training.options.task}")
    training = request.training
    backend = context.stack.choose_backend(training.options.backend)
    trials: list[Trial] = []

    def check(session: JobSession) -> None:
        trials.extend(plan_trials(request.grid, session.facts().values(), backend))
        on_plan(tuple(trials))

    series = open_trials(context, "tune", training, request.seconds, check)
    results = {
        trial: _run_trial(series, trial, f"Trial {number} of {len(trials)}: {trial}")
        for number, trial in enumerate(trials, start=1)
    }
    best = choose_best(results)
    if best is None:
        raise all_failed(series.session, [result.failure for result in results.values()])
    tuned = _as_tuned(series.session, request, best, results[best].samples_per_second or 0.0)
    save_tuned(series.session.head, tuned)
    return tuned, results


def _run_trial(series: TrialSeries, trial: Trial, title: str) -> TrialResult:
    training = series.training
    placement = replace(
        training.placement,
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers or None,
    )
    return series.run(replace(training.options, batch_size=trial.batch_size), placement, title)


def _as_tuned(
    session: JobSession, request: TuneRequest, trial: Trial, samples_per_second: float
) -> TuningResult:
    compared = len(request.grid.batch_sizes) > 1
    return TuningResult(
        key=tuning_key(session.context.stack, request.training, session.facts().values()),
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers,
        batch_size=trial.batch_size if compared else None,
        samples_per_second=samples_per_second,
        when=render_time(session.context.now),
    )
