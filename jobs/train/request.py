"""What to train, as wished for on this machine: checked here, then put into the nodes' terms."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from infra.errors import UsageError
from jobs.launch.plan import PlacementOptions
from jobs.launch.record import read_job_id
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.squad.dataset import read_dataset, require_short_questions
from jobs.worker.squad.options import SCRATCH, TrainOptions
from provision.stacks import Stack
from provision.stacks.stack import TORCH
from provision.stacks.versions import python_minor, release

# The job's code uses zip's strict (Python 3.10) and the fused AdamW for CPUs (torch 2.4).
_OLDEST_PYTHON, _OLDEST_TORCH = "3.10", "2.4"


@dataclass(frozen=True)
class TrainRequest:
    """A training run as wished for, on this machine's paths; ``results`` receives what it makes."""

    options: TrainOptions
    results: Path
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    may_tune: frozenset[str] = frozenset()
    """What may come from `tune`, as the user gave no wish: ``placement``, ``batch_size``."""
    nodes: int | None = None
    """The number of the cluster's first nodes to use; ``None``: all."""


def check_request(request: TrainRequest) -> None:
    """Look at everything that can be judged on this machine, before a cluster is touched.

    Raises :class:`UsageError` naming the file and record, or the model, that can't be used.
    """
    check_inputs(request.options)
    check_results(request.results)


def check_inputs(options: TrainOptions) -> None:
    """The data and the model: raises :class:`UsageError` for what can't be used."""
    for path in filter(None, (options.data, options.eval)):
        try:
            questions = read_dataset(Path(path), [] if options.skip_bad_records else None)
            if not options.skip_bad_records:
                require_short_questions(path, questions, options.max_length)
        except DatasetError as error:
            raise UsageError(error.message, hint=error.hint) from None
    model = local_model(options)
    if model and not (model / "config.json").is_file():
        raise UsageError(
            f"--model {options.model}: no config.json in it, so it is not a model's folder",
            hint="a folder written by save_pretrained, or a model's name on the hub",
        )


def check_results(folder: Path) -> None:
    """Raises :class:`UsageError` for a folder that a new job's results can't go into."""
    check_folder(folder)
    check_holder(folder)


def check_folder(folder: Path) -> None:
    """Raises :class:`UsageError` for a folder that can't be made: not after hours of training."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"--results {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--results {folder}: this user can't write into {there}")


def check_holder(folder: Path, job: str = "") -> None:
    """Raises :class:`UsageError` for a folder with another job's results.

    A model of one job must not lie beside the figures of another.
    """
    held = read_job_id(folder)
    if held not in ("", job):
        raise UsageError(
            f"--results {folder}: it holds the results of job {held}",
            hint="give another folder, or remove this one",
        )


def expand_home(path: str) -> Path:
    """A path as the shell would take it; a ``~name`` of nobody stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's fails for nobody


def local_model(options: TrainOptions) -> Path | None:
    """The model's folder on this machine; ``None`` for a name on the hub or a new model.

    Raises :class:`UsageError` for what is clearly a path, and isn't there.
    """
    if options.model == SCRATCH:
        return None
    path = expand_home(options.model)
    if path.is_dir():
        return path
    if path.is_file() or options.model.startswith(("/", ".", "~")):
        raise UsageError(f"--model {options.model}: no such folder")
    return None


def require_able_stack(stack: Stack, command: str = "train squad") -> None:
    """Raises :class:`UsageError` where the stack is too old for our own code on the nodes."""
    torch = stack.pin(TORCH) or "0"
    python_is_old = python_minor(stack.python) < python_minor(_OLDEST_PYTHON)
    if python_is_old or release(torch) < release(_OLDEST_TORCH):
        raise UsageError(
            f"`{command}` can't run on stack {stack.name}: it needs Python {_OLDEST_PYTHON} and "
            f"torch {_OLDEST_TORCH} or newer, and this has Python {stack.python} and torch {torch}",
            hint="use a cluster with --stack intel or upstream",
        )


def chosen_backend(options: TrainOptions, stack: Stack) -> str:
    """The backend that the options name, the stack's own for ``auto``."""
    return stack.backend if options.backend == "auto" else options.backend


def needs_hub(options: TrainOptions) -> bool:
    """The ranks will ask the hub for a model or data."""
    from_hub = options.model != SCRATCH and local_model(options) is None
    return from_hub or options.data is None


def options_on_nodes(options: TrainOptions, stack: Stack) -> TrainOptions:
    """Return the options in the nodes' terms: paths in the job's folder, the stack's own backend."""
    return replace(
        options,
        model="model" if local_model(options) else options.model,
        data="data/train.json" if options.data else None,
        eval="data/eval.json" if options.eval else None,
        output="output",
        backend=chosen_backend(options, stack),
        ipex=options.ipex or stack.use_ipex,
    )


def data_files(options: TrainOptions) -> dict[str, Path | bytes]:
    """Return the data and a local model, named relative to the job's folder."""
    files: dict[str, Path | bytes] = {}
    if options.data:
        files["data/train.json"] = Path(options.data)
    if options.eval:
        files["data/eval.json"] = Path(options.eval)
    model = local_model(options)
    if model:
        files["model"] = model.resolve()
    return files
