"""Predict with a trained model of any task: from Python, or on lines of JSON.

    python -m worker.tasks.predict MODEL < rows.jsonl > predictions.jsonl

Each input line is a row, such as ``{"question": …, "context": …}`` or ``{"text": …}``; each output line is
the prediction for it, in the same order. Exit code 2 is a row that can't be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from ..runtime.errors import DatasetError, ModelError, WorkerError
from ..runtime.precision import choose_here
from ..runtime.process import hide_progress_bars
from ..training.model import NO_SETTINGS, load_pretrained, settle_padding
from ..training.options import is_exported
from ..training.task import Loaded
from ..training.text_task import Row, TextTask
from . import find_task
from .adapters import ADAPTERS, load_adapters, merge

LINES = 256
"""Rows per batch of lines, to limit the memory."""


def predict(
    model: str | Path,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] = NO_SETTINGS,
    base: str = "",
) -> list[dict[str, Any]]:
    """Return the predictions of the model in a folder for rows, in order.

    Raises :class:`ModelError`, or :class:`DatasetError` for a row that can't be used.
    """
    task, loaded = load_trained(str(model), settings, base)
    return task.predict(loaded, [Row(f"row {n}", row) for n, row in enumerate(rows, start=1)])


def load_trained(
    model: str, settings: Mapping[str, Any] = NO_SETTINGS, base: str = ""
) -> tuple[type[TextTask[Any]], Loaded]:
    """Return a trained model and the task that its architecture belongs to. Raises :class:`ModelError`.

    A model that was exported for OpenVINO computes with that form, where OpenVINO is installed.
    ``base`` is the folder of the model that adapters belong to, if it is not where they say.
    """
    task = find_task(model, settings)
    dtype = task.predicts_in(settings)
    if Path(model, ADAPTERS).exists():
        loaded = load_adapters(model, base, dtype)
        # Kept apart, adapters would add two matrix products to each of the model's.
        loaded = loaded._replace(model=loaded.model.merge_and_unload())
    else:
        loaded = load_pretrained(model, task.head, dtype=dtype)
    if loaded.new_weights:
        raise ModelError(
            f"model {model} was not trained: it has no {', '.join(loaded.new_weights)}"
        )
    settle_padding(loaded)
    if is_exported(model):
        from ..training.export import use_exported

        loaded = use_exported(Path(model), loaded)
    elif task.autocasts and choose_here() == "bf16":
        # Autocast would convert the weights at each call: a third of the time of a short text (DistilBERT).
        for module in loaded.model.modules():
            if type(module) is nn.Linear:
                module.bfloat16()
    return task, loaded._replace(settings=settings)


def predict_rows(
    task: type[TextTask[Any]], loaded: Loaded, rows: Sequence[Row]
) -> Sequence[dict[str, Any] | str]:
    """Return each row's prediction, or why it has none: one row that fails costs the others nothing."""
    cut = Counter(loaded.cut)
    try:
        return task.predict(loaded, rows)
    except DatasetError as error:
        if loaded.cut is not None:
            loaded.cut.clear()
            loaded.cut.update(cut)
        if len(rows) == 1:
            return [error.message]
        return [predict_rows(task, loaded, [row])[0] for row in rows]


def _read_lines(stream: TextIO) -> Iterator[Row]:
    for number in count(1):
        place = f"line {number}"
        try:
            line = stream.readline()
            if not line:
                return
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{place}: is not JSON") from error
        if row is not None:
            yield Row(place, row)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict for the lines on standard input. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="predict", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a trained model, as `train` writes it")
    parser.add_argument("--settings", type=json.loads, default={}, help="a task's options, as JSON")
    parser.add_argument("--base", default="", help="folder of the model that adapters belong to")
    parser.add_argument("--merge", help="folder to write adapters to, merged into their model")
    given = parser.parse_args(argv)
    hide_progress_bars()
    try:
        if given.merge:
            merge(given.model, Path(given.merge), given.base)
            return 0
        task, loaded = load_trained(given.model, given.settings, given.base)
        rows = _read_lines(sys.stdin)
        while some := list(islice(rows, LINES)):
            for found in task.predict(loaded, some):
                sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
            sys.stdout.flush()
    except WorkerError as error:
        hint = f" ({error.hint})" if error.hint else ""
        print(f"predict: error: {error.message}{hint}", file=sys.stderr)
        return 2 if isinstance(error, DatasetError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
