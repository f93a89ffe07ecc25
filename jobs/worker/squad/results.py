"""What a run leaves in its output folder, for the user and for the next program.

model/             weights, configuration and tokenizer, as transformers loads them
predictions.json   {question id: answer}
checkpoints/       see :mod:`.checkpoints`; on rank 0's machine
metrics/           see :mod:`.metrics`; each rank's file on its own machine
logs/              all that rank N printed, as rank-N.log, likewise
results.json       :class:`Results`; written last, so where it is the rest is there too
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..runtime.errors import TrainingError, first_line
from ..runtime.pinning import Place
from .checkpoints import FOLDER as CHECKPOINTS
from .checkpoints import list_checkpoints
from .model import Loaded


@dataclass(frozen=True)
class RankFacts:
    """One process: ``cpus`` counts those it may run on, ``threads`` those torch computes with.

    ``planned`` is what the launcher wanted for it (``None``: nothing), ``found`` what it has.
    """

    rank: int
    hostname: str
    pid: int
    threads: int
    cpus: int
    planned: Place | None
    found: Place


@dataclass(frozen=True)
class Results:
    """One finished run. ``em`` and ``f1`` are percentages; a sample is one feature (token window);
    ``samples_per_second`` is that of training, all ranks together, and so is ``tokens_per_second``,
    padding left out. ``resumed_after`` are the steps after which an interrupted run went on; its
    ``seconds`` count all training, but no interruption."""

    em: float
    f1: float
    eval_questions: int
    train_questions: int
    train_features: int
    loss_curve: list[tuple[int, float]]
    resumed_after: list[int]
    samples_per_second: float
    tokens_per_second: float
    seconds: Mapping[str, float]
    world_size: int
    ranks: list[RankFacts]
    backend: str
    backend_reason: str
    dtype: str
    dtype_reason: str
    amx: bool
    batch_size_per_rank: int
    epochs: int
    learning_rate: float
    seed: int
    model: str
    data: str
    eval_data: str
    versions: Mapping[str, str]
    recipe: str = "fast"

    def to_dict(self) -> dict[str, Any]:
        """As results.json holds it."""
        return asdict(self)


def prepare_output(folder: Path, *, resume: bool) -> None:
    """Make the folder, and remove an earlier run's results; raises :class:`TrainingError`.

    At the beginning of a run: a folder that can't be written must not cost a training first, and
    an interrupted run must not show an earlier one's figures.
    """
    results = folder / "results.json"
    if not resume and not results.exists() and list_checkpoints(folder):
        raise TrainingError(
            f"--output {folder} holds the checkpoints of a run that has not ended",
            hint="--resume continues it; or give another folder, or remove this one",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(results, "")
        if not resume:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        results.unlink()
    except OSError as error:
        raise TrainingError(f"--output {folder} can't be written: {error.strerror}") from error


def save_model(folder: Path, loaded: Loaded) -> None:
    """Write ``model/``, complete or not at all; raises :class:`TrainingError`."""
    from safetensors import SafetensorError

    target, partial = folder / "model", folder / ".model.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name, value in loaded.own.items():
            setattr(loaded.model.config, name, value)
        loaded.model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    # A disk that is full is no OSError to safetensors.
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"{target} can't be written: {first_line(error)}",
            hint="make room, then --resume: the last checkpoint has all that was learnt",
        ) from error


def save_json(path: Path, content: object) -> None:
    """Write one JSON file, complete or not at all; raises :class:`TrainingError`."""
    try:
        _write(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise TrainingError(f"{path} can't be written: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
