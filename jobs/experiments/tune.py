"""``tune``: short trials of a training job on its cluster; the best is kept for later jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from infra.tags import render_time
from jobs.experiments.trial_grid import Outcome, Trial, TrialGrid, choose_best, plan_trials
from jobs.experiments.trials import TrialSeries, all_failed, open_trials
from jobs.launch.session import JobContext, JobSession
from jobs.train.request import TrainRequest, chosen_backend, require_able_stack
from jobs.train.tuned import TuningResult, save_tuned, tuned_key


@dataclass(frozen=True)
class TuneRequest:
    """``training`` is the job to speed up; ``seconds`` is the length of each trial."""

    training: TrainRequest
    grid: TrialGrid
    seconds: int


def tune(
    context: JobContext, request: TuneRequest, on_plan: Callable[[tuple[Trial, ...]], None]
) -> tuple[TuningResult, tuple[Outcome, ...]]:
    """Run every trial and keep the fastest on the head.

    ``on_plan`` receives the trials before the first one. Raises :class:`JobError` if none succeeds.
    Ctrl-C stops the current trial, and nothing is kept.
    """
    require_able_stack(context.stack, "tune squad")
    training = request.training
    backend = chosen_backend(training.options, context.stack)
    trials: list[Trial] = []

    def check(session: JobSession) -> None:
        trials.extend(plan_trials(request.grid, session.facts().values(), backend))
        on_plan(tuple(trials))

    series = open_trials(context, "tune", training, request.seconds, check)
    outcomes = tuple(
        _run_trial(series, trial, f"Trial {number} of {len(trials)}: {trial}")
        for number, trial in enumerate(trials, start=1)
    )
    best = choose_best(outcomes)
    if best is None:
        raise all_failed(series.session, [outcome.failure for outcome in outcomes])
    tuned = _as_tuned(series.session, request, best, backend)
    save_tuned(series.session.head, tuned)
    return tuned, outcomes


def _run_trial(series: TrialSeries, trial: Trial, title: str) -> Outcome:
    training = series.training
    placement = replace(
        training.placement,
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers or None,
    )
    done = series.run(replace(training.options, batch_size=trial.batch_size), placement, title)
    return Outcome(trial, done.threads, done.samples_per_second, done.failure)


def _as_tuned(
    session: JobSession, request: TuneRequest, best: Outcome, backend: str
) -> TuningResult:
    training, trial, stack = request.training, best.trial, session.context.stack
    compared = len(request.grid.batch_sizes) > 1
    return TuningResult(
        key=tuned_key(
            stack.name,
            backend,
            training,
            session.facts().values(),
            ipex=training.options.ipex or stack.use_ipex,
        ),
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers,
        batch_size=trial.batch_size if compared else None,
        samples_per_second=best.samples_per_second or 0.0,
        when=render_time(session.context.now),
    )
