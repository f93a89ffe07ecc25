"""A study of the speed: short trials with other numbers of nodes, ranks, and oneCCL workers, one by one.

Each trial is a job that trains as the real one would, on all cores of its nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from infra.ec2.tags import render_time
from infra.errors import JobError, UsageError
from infra.words import counted
from jobs.places.launcher import CANCELLED
from jobs.places.placement import even_splits, no_ccl_workers
from jobs.places.plan import new_job_id
from jobs.places.queue.job_output import Event, explain
from jobs.places.queue.session import JobContext, JobSession, open_session
from jobs.train.request import TrainRequest, require_able_stack
from jobs.train.train import plan_training
from jobs.train.tuned import TuningResult, save_tuned, tuning_key
from jobs.worker.spec import PlacementOptions
from jobs.worker.study.plan import Domain
from jobs.worker.supervisor.attempt import SUCCEEDED
from jobs.worker.training.options import TrainOptions
from provision.facts import HostFacts

MOST_SPEED_TRIALS = 64
SECONDS, START_UP_S = 20, 30
"""Measured training of a trial, and its approximate start-up: ranks load the model, and read the data."""


@dataclass(frozen=True)
class Trial:
    """One placement and batch size of the ranks; ``ccl_workers`` is 0 without oneCCL."""

    nodes: int
    nproc_per_node: int
    ccl_workers: int
    batch_size: int


@dataclass(frozen=True)
class TrialResult:
    """The speed of a trial: samples per second of all ranks and seconds per step, or why it failed."""

    threads: int | None = None
    samples_per_second: float | None = None
    step_s: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class PlacementStudy:
    """The trials, and the fastest; ``kept`` is what later jobs on these nodes use, if it was saved."""

    results: Mapping[Trial, TrialResult]
    best: Trial
    kept: TuningResult | None

    def efficiency(self, trial: Trial) -> float | None:
        """Return a trial's speed per node, as a share of that of the best one on the fewest nodes."""
        speeds = {each: done.samples_per_second or 0.0 for each, done in self.results.items()}
        fewest = min(each.nodes for each, speed in speeds.items() if speed)
        base = max(speed for each, speed in speeds.items() if each.nodes == fewest) / fewest
        return speeds[trial] / trial.nodes / base if speeds[trial] else None


def plan_trials(
    tune: Mapping[str, Domain],
    training: TrainRequest,
    facts: Iterable[HostFacts],
    backend: str,
) -> tuple[Trial, ...]:
    """Return every combination. What the study varies without values gets those that suit the nodes.

    Raises :class:`UsageError` for more than :data:`MOST_SPEED_TRIALS`, for more nodes than there are, and for
    workers without oneCCL.
    """
    there, given = list(facts), training.spec.resources
    if (given.nodes or 0) > len(there):
        raise UsageError(f"--nodes {given.nodes}: the cluster has {len(there)}")
    there = there[: given.nodes]

    def values(name: str, default: int | None, suited: tuple[int, ...]) -> tuple[int, ...]:
        if name in tune:
            return tune[name].choices or suited
        return (default,) if default else suited[:1]

    most = len(there)
    powers = tuple(2**power for power in range(most.bit_length()) if 2**power < most)
    nodes = values("nodes", most, (*powers, most))
    if max(nodes) > len(there):
        raise UsageError(f"--tune nodes={max(nodes)}: expected at most {len(there)}")
    if backend != "ccl" and "ccl_workers" in tune and tune["ccl_workers"].choices:
        raise no_ccl_workers(backend)
    ccl_workers: tuple[int, ...] = (0,)
    if backend == "ccl":
        ccl_workers = values("ccl_workers", given.placement.ccl_workers, (1, 2))
    ppn = values("ppn", given.placement.nproc_per_node, suggest_ppn(there, min(ccl_workers)))
    batch_sizes = tune["batch_size"].choices if "batch_size" in tune else ()
    sizes = tuple(map(int, batch_sizes)) or (training.options.batch_size,)
    trials = tuple(itertools.starmap(Trial, itertools.product(nodes, ppn, ccl_workers, sizes)))
    if len(trials) > MOST_SPEED_TRIALS:
        raise UsageError(
            f"--tune: {len(trials)} trials, expected at most {MOST_SPEED_TRIALS}",
            hint="give shorter lists: the trials are all combinations of them",
        )
    return trials


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


def study_placement(
    context: JobContext, training: TrainRequest, tune: Mapping[str, Domain]
) -> PlacementStudy:
    """Run every trial, and keep the fastest placement on the head.

    If the trials differ in their nodes, nothing is kept. Raises :class:`JobError` if none succeeds.
    Ctrl-C stops the current trial, and nothing is kept.
    """
    require_able_stack(context.stack, f"train {training.options.task} --tune")
    backend = context.stack.choose_backend(training.options.backend)

    def note_phase(event: Event) -> None:
        if event["event"] == "phase":
            context.progress.note(event["name"])

    with context.progress.phase("Prepare the trials"):
        noting = replace(context, on_event=note_phase)
        session = open_session(noting, new_job_id("tune", context.now))
        trials = plan_trials(tune, training, session.facts().values(), backend)
        minutes = len(trials) * (SECONDS + START_UP_S) / 60
        context.on_log(
            f"{counted(len(trials), 'trial')} of {SECONDS} s each: about {minutes:.0f} min with start-up"
        )
        plan = plan_training(training, context.stack)
        session.place(plan)
    results = {}
    for number, trial in enumerate(trials, start=1):
        with context.progress.phase(f"Trial {number} of {len(trials)}: {_describe(trial)}"):
            done = results[trial] = _run(session, training, trial)
            speed = done.samples_per_second
            note = f"failed: {done.failure}" if speed is None else f"{speed:.1f} samples/s"
            context.progress.note(note)
    speeds = {each: done.samples_per_second or 0.0 for each, done in results.items()}
    best = max(speeds, key=speeds.__getitem__)
    if not speeds[best]:
        failures = dict.fromkeys(each.failure for each in results.values())
        raise JobError(
            f"every trial failed: {'; '.join(failures)}",
            hint=f"the last log is {session.paths.log} on node0",
        )
    kept = None
    if "nodes" not in tune:
        facts = list(session.facts().values())[: best.nodes]
        kept = TuningResult(
            key=tuning_key(context.stack, training, facts),
            nproc_per_node=best.nproc_per_node,
            ccl_workers=best.ccl_workers,
            batch_size=best.batch_size if len({each.batch_size for each in trials}) > 1 else None,
            samples_per_second=speeds[best],
            when=render_time(context.now),
        )
        save_tuned(session.head, kept)
    return PlacementStudy(results, best, kept)


def _describe(trial: Trial) -> str:
    workers = f", {trial.ccl_workers} oneCCL workers" if trial.ccl_workers else ""
    ranks = f"{trial.nodes} x {trial.nproc_per_node} ranks"
    return f"{ranks}{workers}, batch {trial.batch_size}"


def _run(session: JobSession, training: TrainRequest, trial: Trial) -> TrialResult:
    """Run one trial. A failure is also a result.

    Raises :class:`JobError` if it was canceled, which ends the study.
    """
    options: TrainOptions = replace(
        training.options, batch_size=trial.batch_size, trial_seconds=SECONDS
    )
    placement = PlacementOptions("auto", trial.nproc_per_node, trial.ccl_workers or None)
    request = training.change(options, placement, trial.nodes)
    plan = replace(plan_training(request, session.context.stack), results=None, resume_command=())
    try:
        placed = session.plan_placement(plan.spec.resources, plan.backend)
    except UsageError as error:
        return TrialResult(failure=error.message)
    launch, record = session.describe(plan, placed)
    session.launcher.submit(launch, session.paths, plan.variables)
    result = session.follow(plan, record, quiet=True)
    if result.end.state == CANCELLED:
        raise JobError(f"job {result.record.job} was canceled")
    threads, speed = placed.omp_threads, result.last_event("trial")
    if result.end.state != SUCCEEDED or speed is None:
        return TrialResult(threads, failure=explain(result.end, result.output, "").message)
    step_s = float(speed["seconds"]) / max(int(speed["steps"]), 1)
    return TrialResult(threads, float(speed["samples_per_second"]), step_s)
