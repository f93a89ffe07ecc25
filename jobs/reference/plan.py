"""The published recipe: transformers' own ``run_qa.py`` with the published flags, and its models.

The script comes from the stack (key ``examples``: the source archive of its transformers) or from a
local folder. It runs like any program of ``run``; its results are converted to our ``results.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.errors import JobError, UsageError
from infra.files import read_object
from jobs.places.plan import JobPlan, own_folder
from jobs.places.queue.session import JobContext, run_job
from jobs.places.record import JobRecord
from jobs.program.plan import ProgramFiles, ProgramRequest, plan_program
from jobs.worker.spec import JobSpec, PlacementOptions, Resources, Work
from jobs.worker.training.options import TrainOptions
from provision.install import EXAMPLES
from provision.stacks.compatibility import training_flags
from provision.stacks.stack import TRANSFORMERS, Stack


@dataclass(frozen=True)
class PublishedLaunch:
    """How a published command started `run_qa.py`: ranks per node and its own flags.

    ``reference`` means the published thread counts (``--placement reference``); otherwise each rank
    has its own cores.
    """

    ppn: int
    reference: bool = False
    ipex: bool = False
    bf16: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Preset:
    """A model and its training settings; batch per rank. ``flags`` are the published command's."""

    model: str
    epochs: int
    batch_size: int
    learning_rate: float
    flags: tuple[str, ...]
    one_node: PublishedLaunch
    several_nodes: PublishedLaunch

    def as_options(self, base: TrainOptions) -> TrainOptions:
        """Return the fast recipe's options with this preset's values."""
        names = ("model", "epochs", "batch_size", "learning_rate")
        return replace(base, **{name: getattr(self, name) for name in names})

    def launch_on(self, nodes: int) -> PublishedLaunch:
        return self.one_node if nodes == 1 else self.several_nodes


PRESETS = {
    # https://huggingface.co/blog/intel-sapphire-rapids (December 2022): one process on one node, two
    # on each of four; the learning rate is the Trainer's default.
    "distilbert": Preset(
        model="distilbert-base-uncased",
        epochs=1,
        batch_size=32,
        learning_rate=5e-5,
        flags=(
            *("--model_name_or_path", "distilbert-base-uncased", "--dataset_name", "squad"),
            *("--do_train", "--do_eval", "--per_device_train_batch_size", "32"),
            *("--num_train_epochs", "1"),
        ),
        one_node=PublishedLaunch(ppn=1, ipex=True, bf16=True),
        several_nodes=PublishedLaunch(ppn=2, reference=True, bf16=True, overwrite=True),
    ),
    # https://huggingface.co/docs/transformers/v4.28.1/en/perf_train_cpu_many and later ones: two
    # processes on one node, four on two.
    "bert-large": Preset(
        model="bert-large-uncased",
        epochs=2,
        batch_size=12,
        learning_rate=3e-5,
        flags=(
            *("--model_name_or_path", "bert-large-uncased", "--dataset_name", "squad"),
            *("--do_train", "--do_eval", "--per_device_train_batch_size", "12"),
            *("--learning_rate", "3e-5", "--num_train_epochs", "2"),
            *("--max_seq_length", "384", "--doc_stride", "128"),
        ),
        one_node=PublishedLaunch(ppn=2, ipex=True),
        several_nodes=PublishedLaunch(ppn=2, ipex=True, bf16=True),
    ),
}


SCRIPT = "run_qa.py"
SMOKE_SECONDS = 60
OUTPUT = "model"
"""The script's output folder, below the job's: `predict` and `--push-to` look for a model there.

The script refuses to start if it exists.
"""
# timeout exits with 124 when the time is up, the expected end here.
_FOR_A_MINUTE = (
    'timeout --kill-after=20 "$0" "$@"; code=$?; [ $code = 124 ] || exit $code; echo "@smoke over"'
)
# With any of these, a single Trainer assumes that it is one of several: transformers 4.24 then requires
# --xpu_backend, which the published one-node command lacks.
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class ReferenceRequest:
    """A run of the published recipe. ``script`` is a local folder with ``run_qa.py``.

    ``smoke`` runs it for a minute on one node, to check that nothing is missing.
    """

    preset: Preset
    results: Path
    spec: JobSpec = field(default_factory=JobSpec)
    script: Path | None = None
    smoke: bool = False


def reference_argv(
    stack: Stack, preset: Preset, nodes: int, output: str, script: str = f"{EXAMPLES}/{SCRIPT}"
) -> tuple[str, ...]:
    """Return every rank's command on ``nodes`` nodes, with the flags of the stack's transformers. Pure.

    Raises :class:`UsageError` if its transformers has no flags for what the stack needs.
    """
    launch = preset.launch_on(nodes)
    known = training_flags(stack)
    backend, rest = known.argv[:2], known.argv[2:]
    unwanted = {
        flag
        for flag, wanted in {"--use_ipex": launch.ipex, "--bf16": launch.bf16}.items()
        if not wanted
    }
    argv = ["python", script, *preset.flags, "--output_dir", output]
    # Removed in transformers 5.
    overwrite = launch.overwrite and "--overwrite_output_dir" in known.known
    argv += ["--overwrite_output_dir"] if overwrite else []
    argv += backend if nodes * launch.ppn > 1 else ()
    argv += [word for word in rest if word not in unwanted]
    if nodes * launch.ppn == 1:
        return ("env", *(word for name in _RANK_VARIABLES for word in ("-u", name)), *argv)
    return tuple(argv)


def reference_placement(preset: Preset, nodes: int) -> PlacementOptions:
    """Return the published command's placement: its own thread counts, or each rank on its own cores."""
    launch = preset.launch_on(nodes)
    if launch.reference:
        return PlacementOptions("reference")
    return PlacementOptions(nproc_per_node=launch.ppn)


def plan_reference(request: ReferenceRequest, stack: Stack, nodes: int) -> JobPlan:
    """Return the plan of the published recipe. Raises :class:`UsageError` if the stack lacks the script."""
    nodes = 1 if request.smoke else nodes
    files, script = locate_script(stack, request.script)
    launch = request.preset.launch_on(nodes)
    argv = reference_argv(stack, request.preset, nodes, f"../output/{OUTPUT}", script)
    if request.smoke:
        argv = ("sh", "-c", _FOR_A_MINUTE, str(SMOKE_SECONDS), *argv)
    resources = Resources(nodes, reference_placement(request.preset, nodes))
    program = ProgramRequest(
        replace(request.spec, work=Work(program=argv), resources=resources),
        files=files,
        results=request.results,
        # A single process needs no core for oneCCL.
        backend="gloo" if nodes * launch.ppn == 1 else "auto",
        kind="squad",
    )
    return replace(plan_program(program, stack), title="Train")


def locate_script(stack: Stack, folder: Path | None) -> tuple[ProgramFiles, str]:
    if folder is not None:
        names = sorted(path for path in folder.glob("*.py") if path.is_file())
        return ProgramFiles({path.name: path.resolve() for path in names}), SCRIPT
    if stack.examples:
        return ProgramFiles({}), f"{EXAMPLES}/{SCRIPT}"
    version = stack.pin(TRANSFORMERS)
    archive = f"https://github.com/huggingface/transformers/archive/refs/tags/v{version}.tar.gz"
    raise UsageError(
        f"stack {stack.name} has no {SCRIPT}, which is not in transformers' wheel",
        hint="use a cluster with --stack intel or --stack reference, which have it; or --run-qa FOLDER with "
        f"the script of tag v{version}; or in your stack, in spr-cluster.toml: examples = {archive!r}",
    )


def check_script(folder: Path) -> Path:
    """Return the folder of ``run_qa.py``, given it or the script. Raises :class:`UsageError` if missing."""
    if folder.name == SCRIPT and folder.is_file():
        folder = folder.parent
    if not (folder / SCRIPT).is_file():
        raise UsageError(
            f"--run-qa {folder}: no {SCRIPT} in it",
            hint="give the folder examples/pytorch/question-answering of transformers' source",
        )
    return folder


def train_reference(context: JobContext, request: ReferenceRequest) -> dict[str, Any]:
    """Run the published recipe and return the content of ``results.json``.

    A smoke run returns only ``smoke``, a description. Raises :class:`JobError` on failure.
    """
    seen = {"training": False, "timed out": False}

    def listen(line: str) -> None:
        # Messages of the Trainer, the same in all versions so far.
        seen["training"] |= "Running training" in line or "'loss'" in line
        seen["timed out"] |= line == "@smoke over"
        context.on_log(line)

    nodes = len(context.cluster.first(request.spec.resources.nodes).nodes)
    plan = plan_reference(request, context.stack, nodes)
    done = run_job(replace(context, on_log=listen), lambda _: plan).record
    if request.smoke:
        return {
            "recipe": "reference",
            "smoke": describe_smoke(not seen["timed out"], seen["training"]),
        }
    result = read_results(request.results / OUTPUT, request.preset, context.stack, done)
    (request.results / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return {**result, **context.add_receipt(request.results)}


def describe_smoke(ended: bool, trained: bool) -> str:
    """Describe a smoke run's outcome."""
    if ended:
        return "the script finished"
    if trained:
        return f"the script was training when its {SMOKE_SECONDS} s were over"
    return (
        f"nothing failed, but the script did not start training in {SMOKE_SECONDS} s: it was still "
        "loading the model or the data; they are cached on the node for the next run"
    )


def read_results(folder: Path, preset: Preset, stack: Stack, job: JobRecord) -> dict[str, Any]:
    """Return the results of ``run_qa.py`` in the format of our ``results.json``; missing values are ``None``.

    Raises :class:`JobError` if it wrote none.
    """
    found = _read(folder / "all_results.json")
    if "train_runtime" not in found:
        raise JobError(
            f"{SCRIPT} succeeded, but left no training results in {folder}",
            hint=f"the whole log is {own_folder(folder.parent) / 'log'}",
        )
    each = job.placement.nproc_per_node
    history = _read(folder / "trainer_state.json").get("log_history")
    rows = [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []
    seconds = {"train": found["train_runtime"], "evaluate": found.get("eval_runtime")}
    return {
        "recipe": "reference",
        "em": found.get("eval_exact_match"),
        "f1": found.get("eval_f1"),
        "eval_features": found.get("eval_samples"),
        "train_samples": found.get("train_samples"),
        "loss_curve": [(row.get("step"), row["loss"]) for row in rows if "loss" in row],
        "samples_per_second": found.get("train_samples_per_second"),
        "tokens_per_second": None,
        "seconds": {k: v for k, v in {**seconds, "total": job.seconds}.items() if v is not None},
        "world_size": each * len(job.nodes),
        "ranks": [
            {"rank": rank, "hostname": job.nodes[rank // each]["name"]}
            for rank in range(each * len(job.nodes))
        ],
        "backend": job.placement.backend if each * len(job.nodes) > 1 else "none",
        "dtype": "bf16" if "--bf16" in job.argv else "fp32",
        "batch_size_per_rank": preset.batch_size,
        "epochs": preset.epochs,
        "learning_rate": preset.learning_rate,
        "model": preset.model,
        "data": "squad (train)",
        "eval_data": "squad (validation)",
        "versions": stack.versions,
    }


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object that the script wrote; an empty one if it did not."""
    try:
        return read_object(path)
    except UsageError:
        return {}
