"""Predict for each row of a file: by one process, or by all ranks of a job together.

``python -m worker.tasks.predict_file OPTIONS`` is a rank of `spr-cluster predict --nodes`; OPTIONS is
:class:`PredictOptions` as JSON. The rows are predicted in blocks. Rank 0 saves each block in the folder
``parts``, so that a job that runs again continues after the last one; at the end, it writes the output file.
The rows of a large input are also there, mapped by the ranks of a node.

The laptop, which has no torch, imports this module for its options.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..data.mapped import PROBLEM
from ..data.readers import read_table
from ..data.records import refusal, skip_note
from ..data.table import Table, choose_column, read_records
from ..runtime.errors import DatasetError, TrainingError, first_line
from ..runtime.events import name_files
from ..runtime.output import replacing
from ..training.text_task import Row, TextTask

if TYPE_CHECKING:
    from ..data.tokens import Longs
    from ..runtime.context import RankContext
    from ..runtime.ranks import Ranks
    from ..training.task import Loaded

INPUTS = ("text", "pair", "question", "context")
"""What the tasks read; ``--text-column`` names the column of ``text``."""
BLOCK, GROUP = 4096, 32
"""Rows that are saved together, and rows that a rank predicts together. Neither depends on the number of
ranks: the rows of a group share their padding, which counts in bf16."""
REPORT_SECONDS = 5.0

Values = dict[str, Any]
Item = tuple[Mapping[str, Any], Row]
"""A row of the file, and what the task gets of it."""


@dataclass(frozen=True)
class PredictOptions:
    """Paths, and the columns that the user named, by what they contain (:data:`INPUTS`)."""

    model: str
    data: str
    output: str
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_bad_records: bool = False
    backend: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The options of one task, by name, such as ``temperature``."""
    base: str = ""
    """The folder of the model that adapters belong to, if it is not where they say."""


def predict_file(
    options: PredictOptions, ranks: Ranks, parts: Path, report: Callable[[str], None]
) -> Values:
    """Write the file's rows with their predictions; return their number, and how many were skipped.

    All ranks call it together, and rank 0 writes. Raises :class:`..runtime.errors.WorkerError`.
    """
    from .predict import load_trained

    output = Path(options.output)
    suffixes = {each.suffix.lower() for each in (Path(options.data), output)}
    if ".parquet" in suffixes and not find_spec("pyarrow"):
        raise TrainingError("Parquet needs pyarrow", hint="pip install pyarrow")
    task, loaded = load_trained(options.model, options.settings, options.base)
    table, skipped = read_table(options.data, mapped=parts), list[DatasetError]()
    items = read_items(task, table, options, skipped)
    blocks = {parts / f"{n:09d}.json": items[n : n + BLOCK] for n in range(0, len(items), BLOCK)}
    saved: set[Path] = ranks.gather({path for path in blocks if path.exists()})[0]
    missing = {path: block for path, block in blocks.items() if path not in saved}
    todo, done = sum(map(len, missing.values())), 0
    begin = told = time.monotonic()

    def tell(more: float) -> None:
        nonlocal told
        now, rows = time.monotonic(), done + more
        if now - told >= REPORT_SECONDS:
            told, speed = now, rows / (now - begin)
            left = f"{speed:.1f} rows/s, {(todo - rows) / speed:.0f} s left"
            report(f"{len(items) - todo + rows:,.0f} of {len(items):,} rows, {left}")

    for path, block in missing.items():
        asked = [row for _, row in block]
        found = _predict_together(ranks, asked, partial(predict_rows, task, loaded), tell)
        bad = [DatasetError(each) for each in found if isinstance(each, str)]
        if bad and not options.skip_bad_records:
            raise refusal(bad)
        if ranks.first:
            with replacing(path) as target:
                target.write_text(json.dumps(found), encoding="utf-8")
        done += len(block)
    if not ranks.first:
        return {}
    speed = round(done / max(time.monotonic() - begin, 1e-9), 1)
    config = loaded.model.config
    several = getattr(config, "problem_type", "") == "multi_label_classification"
    rows = Predicted(table, blocks, several).write(output, skipped, report)
    note = name_files(skip_note(skipped)) if skipped else None
    written = {"rows": rows, "skipped": len(skipped), "skip_note": note}
    return {"task": task.name, **written, "rows_per_second": speed}


@dataclass(frozen=True)
class Predicted:
    """A file's rows with their predictions, which are in ``saved``; ``several``: a row has several labels."""

    table: Table
    saved: Mapping[Path, Sequence[Item]]
    several: bool

    def write(
        self, output: Path, skipped: list[DatasetError], report: Callable[[str], None]
    ) -> int:
        """Write the output, and remove ``saved``; return the number of rows, and add to ``skipped``."""
        count = sum(map(len, self.blocks(skipped)))
        if not count:
            raise refusal(skipped, has_good=False)
        report(f"writing {count:,} rows")
        with replacing(output) as target:
            WRITERS[output.suffix.lower()](target, self)
        for path in self.saved:
            path.unlink()
        return count

    def blocks(self, skipped: list[DatasetError] | None = None) -> Iterator[list[Values]]:
        """Yield blocks of rows; add why others have no prediction to ``skipped``."""
        for path, block in self.saved.items():
            found = json.loads(path.read_text(encoding="utf-8"))
            if skipped is not None:
                skipped += [DatasetError(each) for each in found if isinstance(each, str)]
            yield [
                {**values, **self._columns(each, row)}
                for (values, row), each in zip(block, found, strict=True)
                if not isinstance(each, str)
            ]

    def names(self) -> list[str]:
        """Return the columns of all rows."""
        found = (name for rows in self.blocks() for row in rows for name in row)
        return [*dict.fromkeys(chain(self.table.columns, found))]

    def _columns(self, found: Values, row: Row) -> Values:
        """Return a prediction as columns: flat where it can be, under names that the file does not have."""
        columns: Values = {}
        for name, value in found.items():
            if name == "labels" and isinstance(value, dict):
                names, numbers = list(value), list(value.values())
                if self.several:
                    columns |= {"labels": names, "probabilities": numbers}
                else:
                    columns |= {"label": names[0], "probability": numbers[0]}
            elif name == "text" and "question" in row.values:
                columns["answer"] = value
            elif row.values.get(name) != value:  # not what was asked
                columns[name] = value
        return {self._free(name): value for name, value in columns.items()}

    def _free(self, name: str) -> str:
        """Return the name of a new column, which none of the file has."""
        return self._free(f"predicted_{name}") if name in self.table.columns else name


def read_items(
    task: type[TextTask[Any]], table: Table, options: PredictOptions, skipped: list[DatasetError]
) -> Sequence[Item]:
    columns = choose_columns(task, table, options.columns, _trained_columns(options.model))

    def convert(place: str, row: Mapping[str, Any]) -> Item:
        asked: Values = {}
        for name, column in columns.items():
            asked |= task.read_input(name, row.get(column), f"{place}: column {column!r}")
        # A mapped row has one column more.
        return {name: row[name] for name in row if name != PROBLEM}, Row(place, asked)

    return read_records(table, convert, skipped if options.skip_bad_records else None)


def _trained_columns(model: str) -> dict[str, str]:
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
    found = {}
    for name in names:
        known_texts = getattr(task, "predict_columns", getattr(task, "text_columns", ()))
        others = known_texts if name == "text" else ()
        # A language model may have learned from a column of another kind, such as messages.
        own = (column for kind, column in trained.items() if others and kind not in INPUTS)
        known = (*own, trained.get(name, name), name, *others)
        found[name] = choose_column(table, asked.get(name), known, f"--{name}-column")
    return found


def _predict_together(
    ranks: Ranks,
    rows: Sequence[Row],
    predict: Callable[[Sequence[Row]], Sequence[Values | str]],
    tell: Callable[[float], None],
) -> list[Values | str]:
    """Return each row's prediction, or its error, on all ranks: each predicts some groups of rows."""
    import numpy as np

    from ..training.evaluation import compute_together

    lengths = np.array([len(str([*row.values.values()])) for row in rows])
    order = np.argsort(-lengths, kind="stable")  # similar lengths together: less padding
    groups = [order[n : n + GROUP] for n in range(0, len(rows), GROUP)]

    def compute(mine: Sequence[Longs]) -> Iterator[list[tuple[int, Values | str]]]:
        for number, group in enumerate(mine, start=1):
            yield [*zip(group.tolist(), predict([rows[n] for n in group]), strict=True)]
            tell(len(rows) * number / len(mine))

    every = dict(
        pair for part in compute_together(ranks, lengths, compute, groups) for pair in part
    )
    return [every[n] for n in range(len(rows))]


def predict_rows(
    task: type[TextTask[Any]], loaded: Loaded, rows: Sequence[Row]
) -> Sequence[Values | str]:
    """Return each row's prediction, or why it has none."""
    try:
        return task.predict(loaded, rows)
    except DatasetError as error:
        if len(rows) == 1:
            return [error.message]
        return [predict_rows(task, loaded, [row])[0] for row in rows]


_to_json = partial(json.dumps, ensure_ascii=False, default=str)


def _write_lines(target: Path, rows: Predicted) -> None:
    # JSON writes half of a surrogate pair, which UTF-8 lacks, with the same escape.
    with target.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{_to_json(row)}\n" for row in chain.from_iterable(rows.blocks()))


def _write_csv(target: Path, rows: Predicted) -> None:
    names = rows.names()
    with target.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        # It quotes the line breaks in cells that are those between rows.
        lines = SimpleNamespace(write=lambda line: file.write(f"{line[:-2]}\n"))
        writer = csv.writer(lines, lineterminator="\r\n")
        writer.writerow(names)
        for row in chain.from_iterable(rows.blocks()):
            writer.writerow(
                _to_json(value) if isinstance(value, dict | list | bool) else value
                for value in map(row.get, names)
            )


def _write_parquet(target: Path, rows: Predicted) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter, read_schema

    source, names = rows.table.source, rows.names()

    def infer(block: Sequence[Values]) -> Any:
        return pa.table({name: [row.get(name) for row in block] for name in names}).schema

    try:
        schema = pa.unify_schemas(map(infer, rows.blocks()), promote_options="permissive")
        if Path(source).suffix.lower() == ".parquet":
            for each in read_schema(source):
                schema = schema.set(names.index(each.name), each)
        with ParquetWriter(target, schema) as writer:
            for block in rows.blocks():
                writer.write_table(pa.Table.from_pylist(block, schema=schema))
    except (pa.ArrowException, ValueError, TypeError) as error:
        hint = "JSON lines (.jsonl) can hold any values"
        raise TrainingError(
            f"{target.name}: not all values fit Parquet: {first_line(error)}", hint=hint
        ) from error


WRITERS = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}


def main(argv: Sequence[str]) -> int:
    """Predict as this rank. Returns its exit code."""
    from ..runtime.job import RunSettings, run_job

    options = PredictOptions(**json.loads(argv[0]))

    def work(context: RankContext[PredictOptions]) -> Values:
        def report(text: str) -> None:
            context.events.emit("phase", name=text)

        with context.phase("predict"):
            return predict_file(options, context.ranks, Path("parts"), report)

    settings = RunSettings(options.backend, resume="--resume" in argv, model=options.model)
    return run_job(work, options, settings)


if __name__ == "__main__":
    from ..runtime.process import leave

    leave(main(sys.argv[1:]))
