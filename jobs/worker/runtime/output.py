"""A run's output folder: prepared before the work, written completely or not at all.

model/          what was trained, if the job saves it
checkpoints/    the state to resume from; on rank 0's machine
metrics/        see :mod:`.metrics`; each rank's file is on its own machine
logs/           what rank N printed, as rank-N.log; likewise
results.json    written last: if it is there, so is the rest
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .errors import TrainingError

CHECKPOINTS, RESULTS = "checkpoints", "results.json"


def prepare_output(folder: Path, *, resume: bool) -> None:
    """Create the folder, and remove an earlier run's results and checkpoints.

    Raises :class:`TrainingError` if the folder can't be written, or holds an unfinished run. This is
    checked before the work starts: it must not fail after hours, nor show an earlier run's results.
    """
    results = folder / RESULTS
    if not resume and not results.exists() and any((folder / CHECKPOINTS).glob("step-*[0-9]")):
        raise TrainingError(
            f"--output {folder} holds the checkpoints of an unfinished run",
            hint="continue it with --resume, choose another folder, or remove this one",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(results, "")
        if not resume:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        results.unlink()
    except OSError as error:
        raise TrainingError(f"--output {folder} can't be written: {error.strerror}") from error


def save_json(path: Path, content: object) -> None:
    """Write one JSON file, completely or not at all. Raises :class:`TrainingError`."""
    try:
        _write(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise TrainingError(f"{path} can't be written: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
