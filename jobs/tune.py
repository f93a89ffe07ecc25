"""``tune``: short trials of a training job on its cluster, and the best kept for later jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from cluster.nodes import Cluster, HostOpener
from infra.errors import JobError
from infra.progress import Progress
from infra.tags import render_time
from jobs import launch
from jobs.request import TrainRequest, chosen_backend, job_files, require_able_stack
from jobs.running import (
    ask_facts,
    require_all_nodes,
)
from jobs.spec import JobPaths, new_job_id
from jobs.train import tuned_key
from jobs.trial_runs import TrialBench
from jobs.trials import Grid, Outcome, Trial, choose_best, plan_trials
from jobs.tuned import Tuned, save_tuned
from provision.stacks import Stack


@dataclass(frozen=True)
class TuneRequest:
    """``training`` is the job that is to be fast; ``seconds`` are those of each trial."""

    training: TrainRequest
    grid: Grid
    seconds: int


def tune(
    cluster: Cluster,
    stack: Stack,
    open_host: HostOpener,
    request: TuneRequest,
    *,
    progress: Progress,
    now: datetime,
    on_plan: Callable[[tuple[Trial, ...]], None],
    on_log: Callable[[str], None],
) -> tuple[Tuned, tuple[Outcome, ...]]:
    """Run every trial and keep the fastest on the head.

    ``on_plan`` is told the trials before the first. Raises :class:`JobError` where none succeeded.
    Ctrl-C ends the trial that runs, and nothing is kept.
    """
    require_able_stack(stack, "tune squad")
    head = open_host(cluster.head)
    require_all_nodes(cluster)
    training = request.training
    paths = JobPaths(new_job_id("tune", now))
    with progress.phase(f"Prepare {paths.job_id}"):
        launch.require_idle(head)
        facts = ask_facts(cluster, open_host)
        backend = chosen_backend(training.options, stack)
        trials = plan_trials(request.grid, facts.values(), backend)
        on_plan(trials)
        launch.place_files(head, paths, job_files(training.options))
    bench = TrialBench(cluster, stack, head, facts, paths, request.seconds, progress, on_log)
    outcomes = tuple(
        _try_out(bench, training, trial, f"Trial {number} of {len(trials)}: {trial}")
        for number, trial in enumerate(trials, start=1)
    )
    best = choose_best(outcomes)
    if best is None:
        why = "; ".join(dict.fromkeys(outcome.failure for outcome in outcomes))
        raise JobError(f"every trial failed: {why}", hint=f"the last log is {paths.log} on node0")
    tuned = _as_tuned(bench, request, best, now)
    save_tuned(head, tuned)
    return tuned, outcomes


def _try_out(bench: TrialBench, training: TrainRequest, trial: Trial, title: str) -> Outcome:
    wish = replace(
        training.placement,
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers or None,
    )
    done = bench.run(replace(training.options, batch_size=trial.batch_size), wish, title)
    return Outcome(trial, done.threads, done.samples_per_second, done.failure)


def _as_tuned(bench: TrialBench, request: TuneRequest, best: Outcome, now: datetime) -> Tuned:
    training, trial = request.training, best.trial
    compared = len(request.grid.batch_sizes) > 1
    return Tuned(
        key=tuned_key(bench.stack, training.options, training.placement, bench.facts),
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers,
        batch_size=trial.batch_size if compared else None,
        samples_per_second=best.samples_per_second or 0.0,
        when=render_time(now),
    )
