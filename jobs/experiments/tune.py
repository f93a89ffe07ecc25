"""``tune``: short trials of a training job; the fastest placement is kept for later jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from infra.ec2.tags import render_time
from jobs.experiments.trial_grid import Trial, TrialGrid, TrialResult, choose_best, plan_trials
from jobs.experiments.trials import TrialSeries, all_failed, open_trials
from jobs.launchers.queue.session import JobContext, JobSession
from jobs.train.request import TrainRequest, require_able_stack
from jobs.train.tuned import TuningResult, save_tuned, tuning_key


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
