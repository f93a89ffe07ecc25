"""``tune``: short trials of a training job on its cluster, and the best kept for later jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from cluster.nodes import Cluster, HostOpener
from infra.errors import JobError, UsageError
from infra.progress import Progress
from infra.tags import render_time
from jobs import launch
from jobs.placement import plan_placement
from jobs.request import TrainRequest, chosen_backend, job_files, require_able_stack
from jobs.running import (
    Event,
    Output,
    ask_facts,
    explain,
    private_addresses,
    require_all_nodes,
    run_command,
)
from jobs.spec import JobPaths, new_job_id
from jobs.train import build_training, tuned_key
from jobs.trials import Grid, Outcome, Trial, choose_best, plan_trials
from jobs.tuned import Tuned, save_tuned
from provision.facts import HostFacts
from provision.host import Host
from provision.stacks import Stack


@dataclass(frozen=True)
class TuneRequest:
    """``training`` is the job that is to be fast; ``seconds`` are those of each trial."""

    training: TrainRequest
    grid: Grid
    seconds: int


@dataclass(frozen=True)
class _Bench:
    """Where trials run: one folder on the nodes for all of them, so that files travel once."""

    cluster: Cluster
    stack: Stack
    head: Host
    facts: Mapping[str, HostFacts]
    request: TuneRequest
    paths: JobPaths
    progress: Progress
    on_log: Callable[[str], None]


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
    bench = _Bench(cluster, stack, head, facts, request, paths, progress, on_log)
    outcomes = tuple(
        _try_out(bench, trial, f"Trial {number} of {len(trials)}: {trial}")
        for number, trial in enumerate(trials, start=1)
    )
    best = choose_best(outcomes)
    if best is None:
        why = "; ".join(dict.fromkeys(outcome.failure for outcome in outcomes))
        raise JobError(f"every trial failed: {why}", hint=f"the last log is {paths.log} on node0")
    tuned = _as_tuned(bench, best, now)
    save_tuned(head, tuned)
    return tuned, outcomes


def _try_out(bench: _Bench, trial: Trial, title: str) -> Outcome:
    """A trial that can't be placed, or fails, is an outcome too."""
    training = bench.request.training
    wish = replace(
        training.placement,
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers or None,
    )
    options = replace(
        training.options, batch_size=trial.batch_size, trial_seconds=bench.request.seconds
    )
    backend = chosen_backend(options, bench.stack)
    with bench.progress.phase(title):
        try:
            placement = plan_placement(bench.facts, private_addresses(bench.cluster), wish, backend)
        except UsageError as error:
            bench.progress.note(f"failed: {error.message}")
            return Outcome(trial, failure=error.message)
        command = build_training(bench.cluster, bench.stack, placement, options, bench.paths)
        threads = placement.ranks.omp_threads
        found: list[Event] = []
        output = Output(lambda event: _show(event, found, bench.progress), bench.on_log, quiet=True)
        exit_code = run_command(bench.head, command, bench.paths, output)
        if exit_code != 0 or not found:
            failure = explain(exit_code, output, "").message
            bench.progress.note(f"failed: {failure}")
            return Outcome(trial, threads, failure=failure)
        speed = float(found[-1]["samples_per_second"])
        bench.progress.note(f"{speed:.1f} samples/s")
        return Outcome(trial, threads, speed)


def _show(event: Event, found: list[Event], progress: Progress) -> None:
    if event["event"] == "phase":
        progress.note(event["name"])
    elif event["event"] == "trial":
        found.append(event)


def _as_tuned(bench: _Bench, best: Outcome, now: datetime) -> Tuned:
    training, trial = bench.request.training, best.trial
    compared = len(bench.request.grid.batch_sizes) > 1
    return Tuned(
        key=tuned_key(bench.stack, training.options, training.placement, bench.facts),
        nproc_per_node=trial.nproc_per_node,
        ccl_workers=trial.ccl_workers,
        batch_size=trial.batch_size if compared else None,
        samples_per_second=best.samples_per_second or 0.0,
        when=render_time(now),
    )
