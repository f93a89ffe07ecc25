"""A training request: checked on this machine, then translated into paths on the nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from infra.errors import UsageError
from infra.files import check_file, check_folder
from jobs.launch.plan import PlacementOptions
from jobs.launch.record import require_own_results
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.squad.dataset import read_dataset, require_short_questions
from jobs.worker.tasks.squad.options import SquadOptions
from jobs.worker.training.options import SCRATCH, flag
from provision.stacks.stack import TORCH, Stack
from provision.stacks.versions import python_minor, release

MAX_DATA_BYTES = 2 << 30
"""Fifty times SQuAD. Every rank has the whole data in memory, which takes several times this."""
# The worker code uses zip(strict=) (Python 3.10) and fused AdamW for CPUs (torch 2.4).
_OLDEST_PYTHON, _OLDEST_TORCH = "3.10", "2.4"


@dataclass(frozen=True)
class TrainRequest:
    """A training run, with this machine's paths; ``results`` receives its output."""

    options: SquadOptions
    results: Path
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    may_tune: frozenset[str] = frozenset()
    """What `tune` may decide because the user left it open: ``placement``, ``batch_size``."""
    nodes: int | None = None
    """How many nodes of the cluster to use; ``None`` uses all of them."""
    retries: int = 0
    """How often the job may run again after it has lost a rank or a node."""
    elastic: int | None = None
    """With how many nodes at least the job goes on after a loss."""


def check_inputs(options: SquadOptions) -> None:
    """Raise :class:`UsageError` with the file and record, or the model, that can't be used."""
    for path in filter(None, (options.data, options.eval)):
        check_file(Path(path), MAX_DATA_BYTES)
        try:
            questions = read_dataset(Path(path), [] if options.skip_bad_records else None)
            if not options.skip_bad_records:
                require_short_questions(path, questions, options.max_length)
        except DatasetError as error:
            raise UsageError(error.message, hint=error.hint) from None
    model = local_model(options)
    if model and not (model / "config.json").is_file():
        raise UsageError(
            f"--model {options.model}: not a model folder, because it has no config.json",
            hint="give a folder written by save_pretrained, or the name of a model on the hub",
        )
    if model:
        check_folder(model)


def check_forms(options: object, forms: Mapping[str, tuple[str, str]]) -> None:
    """Raise :class:`UsageError` for an option that is given and has not the form of its name.

    A form is a regular expression, and the words for it.
    """
    for name, (form, wanted) in forms.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise UsageError(f"{flag(name)} {value!r}: expected {wanted}")


def check_results(folder: Path, job: str = "") -> None:
    """Raise :class:`UsageError` unless a job's results can go into this folder."""
    check_writable(folder)
    require_own_results(folder, job)


def check_writable(folder: Path, option: str = "--results") -> None:
    """Raise :class:`UsageError` unless the folder can be made and written: not after hours of training."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{option} {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: no permission to write to {there}")


def expand_home(path: str) -> Path:
    """Expand ``~`` as the shell does; an unknown user's ``~name`` stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's fails for unknown users


def local_model(options: SquadOptions) -> Path | None:
    """Return the model's folder on this machine; ``None`` for a model on the hub or a new one.

    Raises :class:`UsageError` if the name is clearly a path and the folder is missing.
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
    """Raise :class:`UsageError` if the stack is too old for ``jobs/worker``."""
    torch = stack.pin(TORCH) or "0"
    python_is_old = python_minor(stack.python) < python_minor(_OLDEST_PYTHON)
    if python_is_old or release(torch) < release(_OLDEST_TORCH):
        raise UsageError(
            f"`{command}` can't run on stack {stack.name}: it needs Python {_OLDEST_PYTHON} and "
            f"torch {_OLDEST_TORCH} or newer, and the stack has Python {stack.python} and torch {torch}",
            hint="use a cluster with --stack intel or upstream",
        )


def chosen_backend(backend: str, stack: Stack) -> str:
    """Return the backend; for ``auto`` the stack's own."""
    return stack.backend if backend == "auto" else backend


def needs_hub(options: SquadOptions) -> bool:
    """Return whether the ranks need a model or data from the hub."""
    from_hub = options.model != SCRATCH and local_model(options) is None
    return from_hub or options.data is None


def options_on_nodes(options: SquadOptions, stack: Stack) -> SquadOptions:
    """Return the options for the nodes: paths in the job's folder, the stack's backend."""
    return replace(
        options,
        model="model" if local_model(options) else options.model,
        data="data/train.json" if options.data else None,
        eval="data/eval.json" if options.eval else None,
        output="output",
        backend=chosen_backend(options.backend, stack),
        ipex=options.ipex or stack.use_ipex,
    )


def data_files(options: SquadOptions) -> dict[str, Path | bytes]:
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
