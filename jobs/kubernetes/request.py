"""A request for a job on Kubernetes, and the job plan that follows from it, with paths in its pods. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from os.path import normpath
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from jobs.kubernetes.image import sample_in_image
from jobs.kubernetes.kinds import TRAIN_JOB, JobKind
from jobs.launch.node_shape import NodeShape
from jobs.launch.plan import JobPlan, PlacementOptions
from jobs.train.presets import Preset
from jobs.train.program import ProgramRequest, plan_program
from jobs.train.program_files import ProgramFiles
from jobs.train.reference import OUTPUT, SCRIPT, locate_script, reference_argv
from jobs.train.request import chosen_backend, local_data, local_model, require_able_stack
from jobs.train.train import plan_options
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import NO_CACHE, SCRATCH, TrainOptions, flag
from provision.stacks.stack import Stack

CLAIM_PATH = "/workspace"
"""Where every pod mounts the claim."""


@dataclass(frozen=True)
class Claim:
    """The volume of data, models, and results: one that exists, or, with a ``size``, a new one."""

    name: str = "spr-cluster"
    size: str | None = None
    storage_class: str | None = None


@dataclass(frozen=True)
class PodOptions:
    """What a job asks of the cluster, besides its training. ``nodes`` is the number of pods."""

    name: str
    nodes: int
    image: str
    kind: JobKind = TRAIN_JOB
    namespace: str | None = None
    claim: Claim = field(default_factory=Claim)
    shape: NodeShape = field(default_factory=NodeShape)
    pull_secret: str | None = None
    hub_secret: str | None = None
    """Holds a token of the hub, under the key ``HF_TOKEN``."""
    any_cpu: bool = False
    """Also run on nodes without AMX."""

    @property
    def folder(self) -> str:
        """The job's folder on the claim."""
        return f"{CLAIM_PATH}/jobs/{self.name}"

    @property
    def output(self) -> str:
        """The ranks' output: logs, metrics, checkpoints, model, results."""
        return f"{self.folder}/output"


def plan_fast(
    options: TrainOptions, placement: PlacementOptions, pods: PodOptions, stack: Stack
) -> JobPlan:
    """Return the plan of a training job, which resumes by itself after a restart.

    Raises :class:`UsageError` for a path that no pod has.
    """
    require_able_stack(stack, f"k8s render {options.task}")
    sample = getattr(TASKS[options.task].demo, "data", None)
    paths: dict[str, Any] = {}
    for name, path in local_data(options).items():
        if str(path) == sample:
            paths[name] = sample_in_image(path)
        else:
            _require_on_claim(name, str(path))
    model = options.model_name or SCRATCH
    is_path = model.startswith(("/", ".", "~"))
    # A folder here is the model of `train`, also with a name as on the hub.
    if is_path or local_model(options):
        _require_on_claim("model", model)
    cache = getattr(options, "token_cache", NO_CACHE)
    if cache.startswith("~"):
        paths["token_cache"] = f"{CLAIM_PATH}/cache/tokens"
    elif cache != NO_CACHE:
        _require_on_claim("token_cache", cache)
    in_pod = replace(
        options,
        **paths,
        output=pods.output,
        backend=chosen_backend(options.backend, stack),
        ipex=options.ipex or stack.use_ipex,
        # A restarted pod begins with the same command. Without a checkpoint, training starts over.
        resume=True,
    )
    offline = "data" in local_data(options) and (is_path or model == SCRATCH)
    return replace(plan_options(in_pod, offline=offline), placement=placement)


def _require_on_claim(name: str, path: str | None) -> None:
    if path is None or Path(normpath(path)).is_relative_to(CLAIM_PATH):
        return
    raise UsageError(
        f"{flag(name)} {path}: no pod has this path",
        hint=f"copy it to the claim, which pods mount as {CLAIM_PATH}, and give its path there, such as "
        f"{CLAIM_PATH}/data/{Path(path).name}",
    )


def plan_reference(
    preset: Preset,
    script: str | None,
    placement: PlacementOptions,
    pods: PodOptions,
    stack: Stack,
) -> JobPlan:
    """Return the plan of the documentation's own job: transformers' ``run_qa.py`` in every rank.

    ``script`` is a folder on the claim; without it, the image has the script from the stack. A restarted
    pod resumes from the script's own checkpoint. Raises :class:`UsageError` if nothing has the script.
    """
    _require_on_claim("run_qa", script)
    where = f"{script}/{SCRIPT}" if script else locate_script(stack, None)[1]
    launch = preset.launch_on(pods.nodes)
    ppn = placement.nproc_per_node or launch.ppn
    # With the flag to overwrite its output, it would start over.
    keeping = replace(launch, overwrite=False, reference=False, ppn=ppn)
    preset = replace(preset, one_node=keeping, several_nodes=keeping)
    argv = reference_argv(stack, preset, pods.nodes, f"{pods.output}/{OUTPUT}", where)
    ranks = pods.nodes * ppn
    program = ProgramRequest(
        command=argv,
        files=ProgramFiles({}),
        results=Path(),
        placement=replace(placement, nproc_per_node=ppn),
        nodes=pods.nodes,
        backend="gloo" if ranks == 1 else "auto",
        kind="squad",
    )
    in_pod = ("--folder=/tmp", f"--output={pods.output}", "--", *argv)
    return replace(plan_program(program, stack), argv=in_pod, title="Train")
