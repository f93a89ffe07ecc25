"""Plans of training jobs on other clusters: in pods, and as a batch script. Pure."""

from __future__ import annotations

from dataclasses import replace
from os.path import normpath
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from jobs.places.kubernetes.image import sample_in_image
from jobs.places.kubernetes.request import CLAIM_PATH, PodOptions
from jobs.places.plan import JobPlan
from jobs.program.plan import ProgramFiles, ProgramRequest, plan_program
from jobs.reference.plan import OUTPUT, SCRIPT, Preset, locate_script, reference_argv
from jobs.train.request import (
    FILES,
    TrainRequest,
    local_data,
    local_model,
    refuse_s3,
    require_able_stack,
    require_data,
    spec_of,
)
from jobs.train.study import job_packages
from jobs.train.train import plan_options, plan_training
from jobs.worker.spec import JobSpec, PlacementOptions, Resources, Work
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import NO_CACHE, SCRATCH, TextOptions, TrainOptions, flag
from provision.stacks.stack import Stack


def plan_in_pods(
    options: TrainOptions, placement: PlacementOptions, pods: PodOptions, stack: Stack
) -> JobPlan:
    """Return the plan of a training job, which resumes by itself after a restart.

    Raises :class:`UsageError` for a path that does not exist in pods.
    """
    require_able_stack(stack, f"train {options.task} --to kubernetes-yaml")
    refuse_s3(options, "on Kubernetes")
    require_data(options)
    sample = getattr(TASKS[options.task].demo, "data", None)
    paths: dict[str, Any] = {}
    for name, path in local_data(options).items():
        if str(path) == sample:
            paths[name] = sample_in_image(path)
        else:
            _require_on_claim(name, str(path))
    model = options.model_name or SCRATCH
    is_path = model.startswith(("/", ".", "~"))
    # As in `train`, a local folder takes precedence over a hub name.
    if is_path or local_model(options):
        _require_on_claim("model", model)
    cache = getattr(options, "token_cache", NO_CACHE)
    if cache == TextOptions().token_cache:
        paths["token_cache"] = f"{CLAIM_PATH}/cache/tokens"
    elif cache != NO_CACHE:
        _require_on_claim("token_cache", cache)
    in_pod = replace(
        options,
        **paths,
        output=pods.output,
        backend=stack.choose_backend(options.backend),
        ipex=stack.choose_ipex(options.ipex),
        # A restarted pod runs the same command. Without a checkpoint, training starts over.
        resume=True,
    )
    named = {"data", *(name for name in FILES if getattr(options, name, None))}
    offline = named <= local_data(options).keys() and (is_path or model == SCRATCH)
    spec = spec_of(options, resources=Resources(pods.nodes, placement))
    plan = plan_options(spec, in_pod, offline=offline)
    # An option per line of the YAML, which users edit.
    packages = job_packages(in_pod, {})
    return replace(plan, argv=(options.task, in_pod.to_json(indent=1)), packages=packages)


def _require_on_claim(name: str, path: str | None) -> None:
    if path is None or Path(normpath(path)).is_relative_to(CLAIM_PATH):
        return
    raise UsageError(
        f"{flag(name)} {path}: no pod has this path",
        hint=f"copy it to the claim, which pods mount as {CLAIM_PATH}, and give its path there, such as "
        f"{CLAIM_PATH}/data/{Path(path).name}",
    )


def plan_reference_in_pods(
    preset: Preset,
    script: str | None,
    placement: PlacementOptions,
    pods: PodOptions,
    stack: Stack,
) -> JobPlan:
    """Return the plan of the documentation's own job: transformers' ``run_qa.py`` in every rank.

    ``script`` is a folder on the claim, or the script in it; without it, the image has the script from the
    stack. A restarted pod resumes from the script's own checkpoint. Raises :class:`UsageError` without one.
    """
    _require_on_claim("run_qa", script)
    # As in `train`, the script itself also names its folder.
    script = script and script.removesuffix(f"/{SCRIPT}")
    where = f"{script}/{SCRIPT}" if script else locate_script(stack, None)[1]
    launch = preset.launch_on(pods.nodes)
    ppn = placement.nproc_per_node or launch.ppn
    # With the flag to overwrite its output, it would start over.
    keeping = replace(launch, overwrite=False, reference=False, ppn=ppn)
    preset = replace(preset, one_node=keeping, several_nodes=keeping)
    argv = reference_argv(stack, preset, pods.nodes, f"{pods.output}/{OUTPUT}", where)
    ranks = pods.nodes * ppn
    resources = Resources(pods.nodes, replace(placement, nproc_per_node=ppn))
    program = ProgramRequest(
        JobSpec(Work(program=argv), resources),
        files=ProgramFiles({}),
        results=Path(),
        backend="gloo" if ranks == 1 else "auto",
        kind="squad",
    )
    in_pod = ("--folder=/tmp", f"--output={pods.output}", "--", *argv)
    return replace(plan_program(program, stack), argv=in_pod, title="Train")


def plan_for_script(request: TrainRequest, stack: Stack) -> JobPlan:
    """Return the plan of a training job on another Slurm cluster.

    Raises :class:`UsageError` for a job that can't run there.
    """
    options = request.options
    require_able_stack(stack, f"train {options.task} --to slurm-script")
    refuse_s3(options, "on another Slurm cluster")
    is_auto = options.backend == "auto"
    if (stack.backend if is_auto else options.backend) == "ccl":
        raise UsageError(
            "--to slurm-script has no oneCCL: its transport has to fit the center's network and MPI",
            hint="use --backend gloo" + (", or --stack upstream" if is_auto else ""),
        )
    # Most centers give users small home folders.
    if isinstance(options, TextOptions) and options.token_cache == TextOptions().token_cache:
        options = replace(options, token_cache="cache/tokens")
    resources = request.spec.resources
    return plan_training(request.change(options, resources.placement, resources.nodes), stack)
