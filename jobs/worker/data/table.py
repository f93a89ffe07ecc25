"""Rows of a file or split, and the records that a task makes of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ..runtime.errors import DatasetError
from .mapped import PROBLEM, Lazy
from .records import noting, refusal

Row = Mapping[str, Any]
Record = TypeVar("Record")


class Table(NamedTuple):
    """The rows of a file or split; ``place(n)`` names the n-th row by its line in an editor."""

    source: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    lines: Sequence[int] = ()
    problems: Sequence[DatasetError] = ()
    """Rows that could not be read."""
    classes: Mapping[str, Sequence[str]] = MappingProxyType({})
    """The names of columns' class numbers, as ``datasets`` keeps them."""
    unit: str = "line"
    """What ``lines`` are the numbers of."""

    def place(self, row: int) -> str:
        """Return where a row is, such as "train.csv: line 7"."""
        where = f"{self.unit} {self.lines[row]}" if self.lines else f"row {row + 1}"
        return f"{self.source}: {where}"


def choose_column(table: Table, asked: str | None, known: Sequence[str], flag: str) -> str:
    """Return the column that the user named, or the first of the known names. Raises ``DatasetError``."""
    stripped = {name.strip(): name for name in reversed(table.columns)}
    for name in known if asked is None else (asked, asked.strip()):
        if name in table.columns or name in stripped:
            return name if name in table.columns else stripped[name]
    # Of a file with a word and its tag in each line, the first line became the names.
    has_words = "words" in known or "tags" in known
    conll = "; if its lines have a word and its tag, rename it to .conll" if has_words else ""
    there = ", ".join(name or "one without a name" for name in table.columns)
    if asked is not None:
        raise DatasetError(f"{table.source}: has no column {asked!r}; it has {there}")
    if len(table.columns) == 1 and flag != "--text-column":
        raise DatasetError(
            f"{table.source}: has one column, {there}, and two are needed",
            hint="give CSV, JSON lines, or Parquet with a column for each",
        )
    raise DatasetError(
        f"{table.source}: which column? It has {there}", hint=f"name it with {flag}{conll}"
    )


def with_class_names(table: Table) -> Table:
    """Return a table with class numbers replaced by class names. -1 is no label."""
    classes = table.classes

    def name(value: Any, names: Sequence[str]) -> Any:
        if isinstance(value, list):
            return [name(each, names) for each in value]
        if not isinstance(value, int):
            return value
        return names[value] if 0 <= value < len(names) else None

    def convert(_: int, row: Row) -> Row:
        return {**row, **{column: name(row[column], names) for column, names in classes.items()}}

    if not classes:
        return table
    if isinstance(table.rows, list):
        return table._replace(rows=[convert(0, row) for row in table.rows])
    return table._replace(rows=Lazy(table.rows, convert))


def read_records(
    table: Table, convert: Callable[[str, Row], Record], skipped: list[DatasetError] | None
) -> Sequence[Record]:
    """Return each row as a record. ``convert`` gets its place and the row, and raises :class:`DatasetError`.

    A bad row is an error; with a list ``skipped``, it is left out and added to the list. Records of rows
    that are not in memory are not either.
    """
    problems, records, kept = list(table.problems), list[Record](), array("q")
    is_mapped = not isinstance(table.rows, list)

    def convert_row(number: int, row: Row) -> Record:
        if is_mapped and row.get(PROBLEM):
            raise DatasetError(row[PROBLEM])
        return convert(table.place(number), row)

    for number, row in enumerate(table.rows):
        with noting(problems):
            record = convert_row(number, row)
            if is_mapped:
                kept.append(number)
            else:
                records.append(record)
    count = len(kept) or len(records)
    if problems and (skipped is None or not count):
        raise refusal(problems, has_good=count > 0)
    if not count:
        raise DatasetError(f"{table.source}: has no rows")
    if skipped is not None:
        skipped += problems
    if is_mapped:
        return Lazy(table.rows, convert_row, None if count == len(table.rows) else kept)
    return records
