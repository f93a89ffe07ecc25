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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.mapped import PROBLEM
from ..data.readers import Table, choose_column, read_records, read_table
from ..data.records import refusal, require_text, skip_note
from ..runtime.errors import DatasetError, TrainingError, first_line
from ..training.text_task import Row, TextTask

if TYPE_CHECKING:
    from ..runtime.context import RankContext
    from ..runtime.ranks import Ranks
    from ..training.task import Loaded

INPUTS = ("text", "pair", "question", "context")
"""What the tasks read; ``--text-column`` names the column of ``text``."""
OUTPUTS = (".csv", ".jsonl", ".parquet")
BLOCK, GROUP = 4096, 32
"""Rows that are saved together, and rows that a rank predicts together. Neither depends on the number of
ranks: the rows of a group share their padding, which counts in bf16."""
REPORT_SECONDS = 5.0

Values = dict[str, Any]


@dataclass(frozen=True)
class PredictOptions:
    """Paths, and the columns that the user named, by what they contain (:data:`INPUTS`)."""

    model: str
    data: str
    output: str
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_bad_records: bool = False
    backend: str = "auto"


class Alone:
    """The only process of a prediction: :class:`..runtime.ranks.Ranks` without others."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


class _Item(NamedTuple):
    """A row of the file, and what the task gets of it."""

    values: Mapping[str, Any]
    asked: Row


@dataclass
class _Pace:
    """Reports the progress through ``total`` rows, every few seconds."""

    total: int
    report: Callable[[str], None]
    done: int = 0
    computed: int = 0
    begin: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def tell(self, rows: float) -> None:
        """Report, if it is time to, that about so many more rows are computed."""
        now = time.monotonic()
        if now - self.told < REPORT_SECONDS:
            return
        self.told, done = now, self.done + rows
        rate = (self.computed + rows) / (now - self.begin)
        left = f"{rate:.1f} rows/s, {(self.total - done) / rate:.0f} s left"
        self.report(f"{done:,.0f} of {self.total:,} rows, {left}")


def predict_file(
    options: PredictOptions, ranks: Ranks | Alone, parts: Path, report: Callable[[str], None]
) -> dict[str, Any]:
    """Write the file's rows with their predictions; return their number, and how many were skipped.

    All ranks call it together, and rank 0 writes. Raises :class:`..runtime.errors.WorkerError`.
    """
    from .predict import load_trained

    paths = Path(options.data), Path(options.output)
    if any(path.suffix.lower() == ".parquet" for path in paths) and not find_spec("pyarrow"):
        raise TrainingError("Parquet needs pyarrow", hint="pip install pyarrow")
    task, loaded = load_trained(options.model)
    table, skipped = read_table(options.data, mapped=parts), list[DatasetError]()
    items = _read_items(task, table, options, skipped)
    blocks = {parts / f"{n:09d}.jsonl": items[n : n + BLOCK] for n in range(0, len(items), BLOCK)}
    saved: set[Path] = ranks.gather({path for path in blocks if path.exists()})[0]
    pace = _Pace(len(items), report)
    for path, block in blocks.items():
        if path not in saved:
            rows = [item.asked for item in block]
            found = _predict_block(task, loaded, rows, {*table.columns}, ranks, pace.tell)
            bad = [DatasetError(each) for each in found if isinstance(each, str)]
            if bad and not options.skip_bad_records:
                raise refusal(bad)
            if ranks.rank == 0:
                _save(path, partial(_write_lines, rows=[found]))
            pace.computed += len(block)
        pace.done += len(block)
    if ranks.rank:
        return {}
    speed = round(pace.computed / max(time.monotonic() - pace.begin, 1e-9), 1)
    written = _join(Path(options.output), table, blocks, skipped, report)
    return {"task": task.name, **written, "rows_per_second": speed}


def _join(
    output: Path,
    table: Table,
    blocks: Mapping[Path, Sequence[_Item]],
    skipped: list[DatasetError],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Write the output from all saved blocks, which are then removed."""

    def joined(bad: list[DatasetError]) -> Iterator[list[Values]]:
        for path, block in blocks.items():
            rows = []
            with path.open(encoding="utf-8") as file:
                for item, each in zip(block, map(json.loads, file), strict=True):
                    if isinstance(each, str):
                        bad.append(DatasetError(each))
                    else:
                        rows.append({**item.values, **each})
            yield rows

    rows = sum(map(len, joined(skipped)))
    if not rows:
        raise refusal(skipped)
    report(f"writing {rows:,} rows")
    _write(output, table, lambda: joined([]))
    for path in blocks:
        path.unlink()
    note = skip_note(skipped) if skipped else None
    return {"rows": rows, "skipped": len(skipped), "skip_note": note}


def _read_items(
    task: type[TextTask[Any]], table: Table, options: PredictOptions, skipped: list[DatasetError]
) -> Sequence[_Item]:
    columns = choose_columns(task, table, options.columns)

    def convert(place: str, row: Mapping[str, Any]) -> _Item:
        asked: Values = {}
        for name, column in columns.items():
            value = row.get(column)
            if isinstance(value, list):
                asked["words"] = value
            else:
                asked[name] = require_text(value, f"{place}: column {column!r}")
        # A mapped row has one column more.
        return _Item({name: row[name] for name in row if name != PROBLEM}, Row(place, asked))

    return read_records(table, convert, skipped if options.skip_bad_records else None)


def choose_columns(
    task: type[TextTask[Any]], table: Table, asked: Mapping[str, str]
) -> dict[str, str]:
    """Return the table's columns by what the task reads in them. Raises :class:`DatasetError`."""
    names = [*task.inputs, *(["pair"] if "pair" in asked and "text" in task.inputs else [])]
    if unknown := [name for name in asked if name not in names]:
        reads = " and ".join(task.inputs)
        raise DatasetError(f"--{unknown[0]}-column: a model of `train {task.name}` reads {reads}")
    known = {"text": ("text", *getattr(task, "text_columns", ()))}
    return {
        name: choose_column(table, asked.get(name), known.get(name, (name,)), f"--{name}-column")
        for name in names
    }


def _predict_block(
    task: type[TextTask[Any]],
    loaded: Loaded,
    rows: Sequence[Row],
    taken: set[str],
    ranks: Ranks | Alone,
    tell: Callable[[float], None],
) -> list[Values | str]:
    """Return each row's new columns, or its error, on all ranks: each predicts some groups of rows."""
    import numpy as np

    from ..training.evaluation import deal_batches

    lengths = np.array([sum(map(len, row.values.values())) for row in rows])
    order = np.argsort(-lengths, kind="stable")  # similar lengths together: less padding
    groups = [order[n : n + GROUP] for n in range(0, len(rows), GROUP)]
    mine, found = deal_batches(groups, lengths, ranks.size)[ranks.rank], list[tuple[int, Any]]()
    for number, group in enumerate(mine, start=1):
        asked = [rows[n] for n in group]
        for n, row, each in zip(group.tolist(), asked, _predict(task, loaded, asked), strict=True):
            new = each if isinstance(each, str) else _as_columns(each, row, loaded, taken)
            found.append((n, new))
        tell(len(rows) * number / len(mine))
    every = dict(pair for part in ranks.gather(found) for pair in part)
    return [every[n] for n in range(len(rows))]


def _predict(
    task: type[TextTask[Any]], loaded: Loaded, rows: Sequence[Row]
) -> Sequence[Values | str]:
    try:
        return task.predict(loaded, rows)
    except DatasetError as error:
        if len(rows) == 1:
            return [error.message]
        return [_predict(task, loaded, [row])[0] for row in rows]


def _as_columns(found: Mapping[str, Any], row: Row, loaded: Loaded, taken: set[str]) -> Values:
    """Return a prediction as columns: flat where it can be, under names that the file does not have."""
    columns: Values = {}
    for name, value in found.items():
        if name == "labels" and isinstance(value, dict):
            names, numbers = list(value), list(value.values())
            if getattr(loaded.model.config, "problem_type", "") == "multi_label_classification":
                columns |= {"labels": names, "probabilities": numbers}
            else:
                columns |= {"label": names[0], "probability": numbers[0]}
        elif name == "text" and "question" in row.values:
            columns["answer"] = value
        elif row.values.get(name) != value:  # not what was asked
            columns[name] = value
    return {f"predicted_{key}" if key in taken else key: columns[key] for key in columns}


Blocks = Callable[[], Iterable[Sequence[Any]]]


def _write(path: Path, table: Table, blocks: Blocks) -> None:
    names = [
        *dict.fromkeys([*table.columns, *(key for some in blocks() for row in some for key in row)])
    ]
    if path.suffix.lower() == ".parquet":
        _save(path, lambda target: _write_parquet(target, names, table, blocks))
    elif path.suffix.lower() == ".csv":
        _save(path, lambda target: _write_csv(target, names, blocks))
    else:
        _save(path, lambda target: _write_lines(target, blocks()))


def _save(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under its name only when it is complete."""
    target = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(target)
        target.replace(path)
    except OSError as error:
        raise TrainingError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            target.unlink()


def _write_lines(target: Path, rows: Iterable[Sequence[Any]]) -> None:
    # JSON writes half of a surrogate pair, which UTF-8 lacks, with the same escape.
    with target.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in (row for some in rows for row in some):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _write_csv(target: Path, names: Sequence[str], blocks: Blocks) -> None:
    with target.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in (row for some in blocks() for row in some):
            writer.writerow(
                json.dumps(value, ensure_ascii=False, default=str)
                if isinstance(value, dict | list | bool)
                else value
                for value in map(row.get, names)
            )


def _write_parquet(target: Path, names: Sequence[str], table: Table, blocks: Blocks) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter, read_schema

    def infer(rows: Sequence[Values]) -> Any:
        return pa.table({name: [row.get(name) for row in rows] for name in names}).schema

    try:
        schema = pa.unify_schemas(map(infer, blocks()), promote_options="permissive")
        if Path(table.source).suffix.lower() == ".parquet":
            own = read_schema(table.source)
            kept = [n for n, each in enumerate(names) if each in table.columns]
            for n in kept:
                schema = schema.set(n, own.field(names[n]))
        with ParquetWriter(target, schema) as writer:
            for rows in blocks():
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    except (pa.ArrowException, ValueError, TypeError) as error:
        hint = "JSON lines (.jsonl) can hold any values"
        raise TrainingError(
            f"{target.name}: not all values fit Parquet: {first_line(error)}", hint=hint
        ) from error


def main(argv: Sequence[str]) -> int:
    """Predict as this rank. Returns its exit code."""
    from ..runtime.job import RunSettings, run_job

    options = PredictOptions(**json.loads(argv[0]))

    def work(context: RankContext[PredictOptions]) -> Values:
        with context.phase("predict"):
            emit = context.events.emit
            ranks, parts = context.ranks, Path("parts")
            return predict_file(options, ranks, parts, lambda text: emit("phase", name=text))

    settings = RunSettings(options.backend, resume="--resume" in argv, model=options.model)
    return run_job(work, options, settings)


if __name__ == "__main__":
    from ..runtime.process import leave

    leave(main(sys.argv[1:]))
