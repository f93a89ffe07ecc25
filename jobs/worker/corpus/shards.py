"""Predict for one shard after another, with a model that is loaded once."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.readers import stream_file
from ..data.records import noting, refusal, require_single
from ..data.table import Table, choose_column
from ..runtime.errors import DatasetError, TrainingError, WorkerError, first_line
from ..training.text_task import Row, TextTask
from .files import Output, present
from .options import INPUTS, PredictOptions, Shard, Source
from .writers import part_suffix, write_part

if TYPE_CHECKING:
    from ..training.task import Loaded

GROUP, SHARD_BYTES = 32, 1 << 20
"""Rows that are predicted together, whose padding counts in bf16, and text of a shard."""
_LOOK_AT = 1000
"""Rows from which a file's columns and its rows' size are known."""
_EMBEDDING, _RENAMED = "embedding", "predicted_"

Values = dict[str, Any]
Item = tuple[Mapping[str, Any], Row]
"""A row of the file, and what the task gets of it."""
Found = tuple[str, "Mapping[str, Any] | DatasetError"]
"""A row's place, and the row, or why it can't be used."""


class Reader:
    """The rows of one file from the ``first`` on, forward and in constant memory."""

    def __init__(self, source: Source, first: int, inputs: Path) -> None:
        self.source, self.at, self._open = source, first, ExitStack()
        self.path = self._open.enter_context(present(source, inputs))
        is_parquet = self.path.suffix.lower() == ".parquet"
        self._rows = self._read(first if is_parquet else 0)
        start = list(islice(self._rows, _LOOK_AT))
        rows = [row for _, row in start if not isinstance(row, DatasetError)]
        self.start = rows
        self._rows = islice(chain(start, self._rows), 0 if is_parquet else first, None)
        sizes = sum(len(str([*row.values()])) for row in rows)
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row))
        self.row_bytes = max(1.0, sizes / max(1, len(rows)))
        self.schema: Any = ()
        self.rows = int(source.size / self.row_bytes)
        """How many rows the file may have."""
        if is_parquet:
            from pyarrow.parquet import ParquetFile

            with ParquetFile(self.path) as file:
                self.schema, self.rows = file.schema_arrow, file.metadata.num_rows
            self.columns = tuple(self.schema.names)

    def take(self, count: int) -> list[Found]:
        """Return the next rows, fewer at the end of the file."""
        found = list(islice(self._rows, count))
        self.at += len(found)
        return found

    def _read(self, first: int) -> Iterator[Found]:
        """Yield rows and errors with the user's name of the file."""
        try:
            for place, row in stream_file(self.path, first):
                if isinstance(row, DatasetError):
                    row.message = self._name(row.message)
                yield self._name(place), row
        except DatasetError as error:
            error.message = self._name(error.message)
            raise

    def _name(self, text: str) -> str:
        return text.replace(str(self.path), self.source.name, 1)

    def close(self) -> None:
        """Remove a local copy."""
        self._open.close()


class Look(NamedTuple):
    """A file's columns, and how many rows a shard has: a power of two, by the size of its first rows."""

    columns: tuple[str, ...]
    shard_rows: int


def look_at(task: type[TextTask[Any]], source: Source, inputs: Path) -> Look:
    """Read the first rows of a file. Raises :class:`WorkerError`."""
    reader = Reader(source, 0, inputs)
    reader.close()
    most = min(task.shard_rows, SHARD_BYTES / reader.row_bytes)
    return Look(reader.columns, max(GROUP, 1 << int(most).bit_length() - 1))


class Predictor:
    """A model, and the file that is open."""

    def __init__(self, options: PredictOptions, inputs: Path) -> None:
        from ..tasks.predict import load_trained

        self._options, self._inputs = options, inputs
        self._task, loaded = load_trained(options.model, options.settings, options.base)
        self._cut = Counter[int]()
        self._loaded = loaded._replace(cut=self._cut)
        self._reader: Reader | None = None

    def predict(self, shard: Shard, output: Output) -> Values:
        """Write a shard's rows with their predictions; return how many there were, and what was skipped.

        Raises :class:`WorkerError` with the file and the rows.
        """
        begin, used, source = time.monotonic(), time.process_time(), shard.source
        self._cut.clear()
        place = f"{source.name}: from row {shard.first + 1:,}"
        try:
            reader = self._open(shard)
            problems = list[DatasetError]()
            read = reader.take(shard.count)
            last = shard.first + len(read)
            place = f"{source.name}: rows {shard.first + 1:,} to {last:,}"
            rows, vector = self._predict(reader, read, problems, shard.columns)
            if rows:
                suffix = part_suffix(self._options.output)
                name = f"{shard.name}-{len(read)}-{len(rows)}{suffix}"
                with output.writing(name, self._inputs) as target:
                    more = reader.schema, vector, reader.start
                    write_part(target, self._options.output, rows, *more)
        except DatasetError:
            raise
        except WorkerError as error:
            raise type(error)(f"{place}: {error.message}", hint=error.hint) from error
        except Exception as error:
            kind = type(error).__name__
            raise TrainingError(f"{place}: {kind}: {first_line(error)}") from error
        return {
            "read": len(read),
            "rows": len(rows),
            "name": name if rows else "",
            "cut": sum(self._cut.values()),
            "problem": problems[0].message if problems else "",
            "expected": reader.rows,
            "seconds": time.monotonic() - begin,
            "core_seconds": time.process_time() - used,
        }

    def _open(self, shard: Shard) -> Reader:
        reader = self._reader
        if reader is None or reader.source != shard.source or reader.at > shard.first:
            if reader:
                reader.close()
            reader = self._reader = Reader(shard.source, shard.first, self._inputs)
        while reader.at < shard.first and reader.take(min(_LOOK_AT, shard.first - reader.at)):
            pass  # rows that other ranks have taken
        return reader

    def _predict(
        self,
        reader: Reader,
        found: Sequence[Found],
        problems: list[DatasetError],
        known: Sequence[str],
    ) -> tuple[list[Values], str | None]:
        options, items = self._options, list[Item]()
        own = (name for _, row in found if not isinstance(row, DatasetError) for name in row)
        columns = tuple(dict.fromkeys(chain(reader.columns, own)))
        bad = [row for _, row in found if isinstance(row, DatasetError)]
        if len(bad) == len(found):  # perhaps of a damaged file, whose columns are unknown
            problems += bad
        else:
            table = Table(reader.source.name, columns, [])
            convert = make_converter(self._task, table, options)
            for place, row in found:
                with noting(problems):
                    if isinstance(row, DatasetError):
                        raise row
                    items.append(convert(place, row))
        if problems and not options.skip_bad_records:
            raise refusal(problems)
        rows, free = list[Values](), name_freely(known)
        several = self._loaded.has_several_labels
        answers = predict_sorted(self._task, self._loaded, [row for _, row in items])
        for (values, asked), each in zip(items, answers, strict=True):
            if isinstance(each, str):
                problems.append(DatasetError(each))
            else:
                more = as_columns(each, asked, several=several)
                renamed = {free(name): value for name, value in more.items()}
                if taken := [name for name in renamed if name in columns]:
                    raise DatasetError(
                        f"{reader.source.name}: has a column {taken[0]!r}, as the predictions for the "
                        "first file of --data, or for the first rows",
                        hint="give that column another name",
                    )
                rows.append({**values, **renamed})
        if problems and not options.skip_bad_records:
            raise refusal(problems)
        has_vectors = any(isinstance(each, dict) and _EMBEDDING in each for each in answers)
        return rows, free(_EMBEDDING) if has_vectors else None


def is_added(task: type[TextTask[Any]], column: str) -> bool:
    """Return whether a column has the name of one with predictions."""
    while column.startswith(_RENAMED):
        column = column[len(_RENAMED) :]
    return column in task.adds


def name_freely(columns: Sequence[str]) -> Callable[[str], str]:
    """Return a function that makes a name one that no column has."""

    def free(name: str) -> str:
        return free(f"{_RENAMED}{name}") if name in columns else name

    return free


def predict_sorted(
    task: type[TextTask[Any]], loaded: Loaded, rows: Sequence[Row]
) -> list[Values | str]:
    """Return each row's prediction, or its error; rows of similar length are predicted together."""
    from ..tasks.predict import predict_rows

    sizes = [len(str([*row.values.values()])) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: -sizes[number])
    found: list[Values | str] = [""] * len(rows)
    for first in range(0, len(rows), GROUP):
        chosen = order[first : first + GROUP]
        answers = predict_rows(task, loaded, [rows[number] for number in chosen])
        for number, answer in zip(chosen, answers, strict=True):
            found[number] = answer
    return found


def make_converter(
    task: type[TextTask[Any]], table: Table, options: PredictOptions
) -> Callable[[str, Mapping[str, Any]], Item]:
    """Return what makes a row an item, given its place. Raises :class:`DatasetError` for missing columns."""
    columns = choose_columns(task, table, options.columns, trained_columns(options.model))
    task.check_columns(table, columns, options.settings)

    def convert(place: str, row: Mapping[str, Any]) -> Item:
        asked = {name: row[name] for name in task.carried if row.get(name) is not None}
        for name, column in columns.items():
            require_single(row.get(column), place)
            asked |= task.read_input(name, row.get(column), f"{place}: column {column!r}")
        return row, Row(place, asked)

    return convert


def as_columns(found: Values, row: Row, *, several: bool) -> Values:
    """Return a prediction as columns: flat where it can be. ``several``: a row has several labels."""
    columns: Values = {}
    for name, value in found.items():
        if name == "labels" and isinstance(value, dict):
            names, numbers = list(value), list(value.values())
            if several:
                columns |= {"labels": names, "probabilities": numbers}
            else:
                columns |= {"label": names[0], "probability": numbers[0]}
        elif name == "text" and "question" in row.values:
            columns["answer"] = value
        elif row.values.get(name) != value:  # not what was asked
            columns[name] = value
    return columns


def trained_columns(model: str) -> dict[str, str]:
    """Return the columns that a model learned from, by what they contain; none if that is unknown."""
    path = Path(model, "config.json")
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    columns: dict[str, str] = found.get("data_columns", {})
    return columns


def choose_columns(
    task: type[TextTask[Any]], table: Table, asked: Mapping[str, str], trained: Mapping[str, str]
) -> dict[str, str]:
    """Return the table's columns by what the task reads in them. Raises :class:`DatasetError`."""
    has_pair = task.takes_pair and "pair" in (*asked, *trained)
    names = [*task.inputs, *(["pair"] if has_pair else [])]
    if unknown := [name for name in asked if name not in names]:
        reads = " and ".join(task.inputs)
        raise DatasetError(f"--{unknown[0]}-column: a model of `train {task.name}` reads {reads}")
    return {
        name: choose_column(
            table, asked.get(name), known_columns(task, name, trained), f"--{name}-column"
        )
        for name in names
    }


def known_columns(
    task: type[TextTask[Any]], name: str, trained: Mapping[str, str]
) -> tuple[str, ...]:
    """Return names of columns with what the task reads, the likeliest first."""
    of_task: Sequence[str] = getattr(task, "predict_columns", ())
    # Others than that of the training are guesses, if it is known.
    known = of_task or (() if name in trained else getattr(task, "text_columns", ()))
    others = known if name == "text" else ()
    # A language model may have learned from a column of another kind, such as messages.
    own = (column for kind, column in trained.items() if others and kind not in INPUTS)
    return (*own, trained.get(name, name), name, *others)
