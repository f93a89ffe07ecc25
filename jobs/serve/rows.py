"""A request's rows as a task reads them, and its predictions as `predict --data` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jobs.serve import TOKENS, Answer
from jobs.worker.corpus.shards import as_columns, known_columns
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.training.model import reading_limit
from jobs.worker.training.task import Loaded
from jobs.worker.training.text_task import Row, TextTask


def read_row(
    task: type[TextTask[Any]], trained: Mapping[str, str], number: int, row: Mapping[str, Any]
) -> Row:
    """Return a row; what the task reads may have the name of the column in ``trained``."""
    place, values = f"row {number}", dict(row)
    for name in (*task.inputs, *(["pair"] if "pair" in trained else [])):
        columns = [each for each in known_columns(task, name, trained) if each in row]
        if name not in row and columns:
            with suppress(DatasetError):  # the task says what it lacks
                values |= task.read_input(name, row[columns[0]], f"{place}: {columns[0]!r}")
    return Row(place, values)


def to_answer(
    task: type[TextTask[Any]], loaded: Loaded, found: Mapping[str, Any] | str, row: Row
) -> Answer:
    """Return a prediction as columns; with a vector, the number of tokens that the model read."""
    if isinstance(found, str):
        return found
    others = {*task.adds} - {"words"}  # words may be what was asked
    asked = {name: value for name, value in row.values.items() if name not in others}
    columns = as_columns(dict(found), Row(row.place, asked), several=loaded.has_several_labels)
    if task.name == "embed":
        limit = reading_limit(loaded)
        text = row.text("text").strip()[: 64 * limit]  # megabytes would take seconds again
        columns[TOKENS] = min(len(loaded.tokenizer(text)["input_ids"]), limit)
    return columns
