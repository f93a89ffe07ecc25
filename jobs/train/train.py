"""``train squad``: from a request to a job plan, and the results of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from infra.errors import JobError, UsageError
from infra.files import read_object
from jobs.places.plan import JobPlan, own_folder
from jobs.places.queue.session import JobContext, JobResult, JobSession, run_job
from jobs.train.request import (
    TrainRequest,
    data_files,
    local_model,
    name_data,
    needs_hub,
    options_on_nodes,
    require_able_stack,
    staged_data,
)
from jobs.train.study import job_packages
from jobs.train.tuned import TuningResult, read_tuned, tuning_key
from jobs.worker.runtime.events import NAMES
from jobs.worker.spec import JobSpec
from jobs.worker.training.options import BASE_MODEL, TrainOptions
from provision.stacks.stack import Stack


def train(context: JobContext, request: TrainRequest) -> dict[str, Any]:
    """Run the job on all nodes and return the content of its ``results.json``.

    Raises :class:`JobError` if it fails.
    """
    require_able_stack(context.stack, f"train {request.options.task}")

    def build(session: JobSession) -> JobPlan:
        return plan_training(_with_tuned(session, request), context.stack)

    return read_results(run_job(context, build))


def read_results(done: JobResult) -> dict[str, Any]:
    """Return a job's ``results.json``. Raises :class:`JobError` if there is no valid one."""
    assert done.plan.results is not None
    path = done.plan.results / "results.json"
    hint = f"the whole log is {own_folder(done.plan.results) / 'log'}"
    if not path.is_file():
        raise JobError(f"job {done.record.job} left no results.json", hint=hint)
    try:
        return read_object(path)
    except UsageError as error:
        raise JobError(error.message, hint=hint) from None


def plan_training(request: TrainRequest, stack: Stack) -> JobPlan:
    """Return the plan of a new training job. Pure, except that it checks for a local model."""
    options = request.options
    on_nodes = options_on_nodes(options, stack)
    storage = replace(request.spec.storage, stage=staged_data(options))
    spec = replace(request.spec, storage=storage)
    plan = plan_options(spec, on_nodes, offline=not needs_hub(options))
    model = local_model(options)
    return replace(
        plan,
        env={
            **plan.env,
            NAMES: json.dumps(name_data(options)),
            **({BASE_MODEL: str(model.absolute())} if model else {}),
        },
        files=data_files(options),
        packages=job_packages(options, spec.work.study),
        variables=request.env,
        details={
            **plan.details,
            **({"env": [word.partition("=")[0] for word in request.env]} if request.env else {}),
            **({"hub_token": True} if request.hub_token else {}),
        },
        results=request.results,
    )


def resume_command(task: str) -> tuple[str, ...]:
    """Return the command that resumes a task's last job."""
    return ("spr-cluster", "train", task, "--resume")


def task_of(job: str) -> str:
    """Return the task of a job, by its ID."""
    return job.partition("-")[0]


def plan_options(spec: JobSpec, options: TrainOptions, *, offline: bool) -> JobPlan:
    """Return the plan of a new or resumed run, with options for the nodes."""
    study = (json.dumps(spec.work.study),) if spec.work.study else ()
    return JobPlan(
        kind=options.task,
        spec=spec,
        module="worker.study" if study else "worker.tasks",
        argv=(options.task, *study, options.to_json()),
        resumes=True,
        backend="gloo" if study else options.backend,
        title="Train",
        # An unreachable hub must not delay or fail a job that needs nothing from it.
        env={"HF_HUB_OFFLINE": "1"} if offline else {},
        details={"recipe": "fast"},
        resume_command=resume_command(options.task),
    )


def _with_tuned(session: JobSession, request: TrainRequest) -> TrainRequest:
    """Return the request with the values the user left open taken from the result of ``--tune placement``."""
    if not request.may_tune or request.spec.work.study:
        return request
    context = session.context
    facts = list(session.facts().values())[: request.spec.resources.nodes]
    found = read_tuned(session.head, tuning_key(context.stack, request, facts))
    if found is None:
        return request
    changed, line = apply_tuned(found, request, len(facts))
    if line:
        context.on_log(line)
    return changed


def apply_tuned(found: TuningResult, request: TrainRequest, nodes: int) -> tuple[TrainRequest, str]:
    """Return the request with a saved result applied, and a line for the user; "" for no change."""
    flags = []
    options, resources = request.options, request.spec.resources
    placement = resources.placement
    if "placement" in request.may_tune:
        placement = replace(
            placement, nproc_per_node=found.nproc_per_node, ccl_workers=found.ccl_workers or None
        )
        flags.append(f"--ppn {found.nproc_per_node}")
        flags += [f"--ccl-workers {found.ccl_workers}"] if found.ccl_workers else []
    # A different global batch changes the training: only if the study compared batch sizes.
    if "batch_size" in request.may_tune and found.batch_size:
        options = replace(options, batch_size=found.batch_size)
        flags.append(f"--batch-size {found.batch_size}")
        if placement.nproc_per_node:
            samples = found.batch_size * placement.nproc_per_node * nodes
            flags.append(f"(a global batch of {samples} samples)")
    line = f"{' '.join(flags)} from `--tune placement` of {found.day}; --placement auto ignores it"
    return request.change(options, placement, resources.nodes), line if flags else ""
