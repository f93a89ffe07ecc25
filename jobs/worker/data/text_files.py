"""Rows of text files: CSV, TSV, JSON, JSON lines, plain text, and CoNLL, with the reasons of bad rows."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import Any, TextIO

from ..runtime.errors import DatasetError, first_line
from .records import as_object, show
from .table import Row, Table

LONGEST_LINE = 1 << 24
"""Characters: a longer line is no record, but a file with other contents."""
_BLANKS = " \t\r\n"
_NO_OBJECT = "is not an object with a value for each column"

Found = tuple[int, "Row | DatasetError"]
"""A row, or the reason why it can't be used, and its line."""
Stream = Callable[[str, TextIO], Iterator[Found]]


def _lines(source: str, file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers. Raises :class:`DatasetError` for what is no text."""
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise DatasetError(f"{source}: line {number}: is longer than {LONGEST_LINE} characters")
        if "\0" in line:
            raise DatasetError(
                f"{source}: line {number}: contains NUL bytes", hint="save it as UTF-8"
            )
        if not line:
            return
        yield number, line


def _csv_rows(source: str, file: TextIO, mark: str = ",") -> Iterator[Found]:
    """Yield the rows; the first one has the columns' names."""
    is_plain, header = mark == "\t" and _is_plain(source, file), list[str]()
    for at, cells, _ in _csv_records(source, file, mark, is_plain):
        if not header and cells == ["sep=", ""]:
            continue  # Excel's line, which names the separator
        if not header:
            header = cells
            _require_names(source, header, mark)
        elif len(cells) == len(header):
            yield at, dict(zip(header, cells, strict=True))
        else:
            which = f"has {len(cells)} columns, and the first line {len(header)}"
            yield at, DatasetError(f"{source}: line {at}: {which}")
    _require_names(source, header, mark)


def _csv_records(
    source: str, file: TextIO, mark: str, is_plain: bool
) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield each record's last line number, cells, and lines. Cells of plain files have no quotes around."""
    at, lines = 0, list[str]()

    def take() -> Iterator[str]:
        nonlocal at
        for at, line in _lines(source, file):  # noqa: B007 - the reader takes several for a quoted cell
            lines.append(line)
            yield line

    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(
        take(),
        delimiter=mark,
        strict=True,
        quoting=csv.QUOTE_NONE if is_plain else csv.QUOTE_MINIMAL,
    )
    try:
        for cells in reader:
            if len(lines) > 1 or lines[0].strip(" \r\n"):
                yield at, cells, lines
            lines.clear()
    except csv.Error as error:
        others = [each for each in ";\t|," if each != mark and f'"{each}"' in lines[0]]
        if others and at == 1:
            raise _other_mark(source, others[0], mark) from error
        raise DatasetError(f"{source}: line {at}: is not CSV: {error}") from error


def _other_mark(source: str, other: str, mark: str) -> DatasetError:
    what = f"its columns are separated by {other!r}, not {mark!r}"
    return DatasetError(f"{source}: line 1: {what}", hint="save it as CSV with commas, or as TSV")


def _is_plain(source: str, file: TextIO) -> bool:
    """Return whether quotation marks in a TSV file belong to the texts, as in GLUE's files.

    Then a mark that begins a cell may have no end, or one in a later row. Raises :class:`DatasetError` if
    a cell may also have line breaks in quotes.
    """
    width, lines, unclear, is_quoted = -1, list[str](), 0, False

    def are_rows() -> bool:
        return all(line.count("\t") == width for line in lines)

    try:
        for at, cells, lines in _csv_records(source, file, "\t", is_plain=False):
            width = len(cells) - 1 if width < 0 else width
            if len(lines) > 1:
                is_quoted |= not are_rows()
                unclear = unclear or (are_rows() and at - len(lines) + 1)
    except DatasetError:
        return width >= 0 and are_rows()
    finally:
        file.seek(0)
    if unclear and not is_quoted:
        raise DatasetError(
            f"{source}: line {unclear}: a quotation mark begins a cell, and its end is in a later row",
            hint="remove the mark, or write the rows as JSON lines",
        )
    return False


def _jsonl_rows(source: str, file: TextIO) -> Iterator[Found]:
    for number, line in _lines(source, file):
        if not line.strip():
            continue
        place = f"{source}: line {number}"
        try:
            found = json.loads(line, object_pairs_hook=as_object)
        except (ValueError, RecursionError) as error:
            yield number, DatasetError(f"{place}: is not JSON: {first_line(error)}")
            continue
        yield number, found if isinstance(found, dict) else DatasetError(f"{place}: {_NO_OBJECT}")


def _text_rows(source: str, file: TextIO, most: float = math.inf) -> Iterator[Found]:
    """Yield texts that are separated by empty lines, as the column ``text``.

    Stops after ``most`` characters, also inside a text.
    """
    lines, first = list[str](), 0
    for number, line in chain(_lines(source, file), [(0, "")]):
        if line.strip() and most > 0:
            first = first if lines else number
            lines.append(line.rstrip("\r\n"))
        elif lines:
            yield first, {"text": "\n".join(lines)}
            lines = []
        most -= len(line)
        if most <= 0 and not lines:
            return


def _collect(stream: Stream, source: str, file: TextIO, limit: int | None) -> Table:
    rows, lines, problems = list[Row](), list[int](), list[DatasetError]()
    for line, row in islice(stream(source, file), limit):
        if isinstance(row, DatasetError):
            problems.append(row)
        else:
            rows.append(row)
            lines.append(line)
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    return Table(source, columns, rows, lines, problems)


def _read_text(source: str, file: TextIO, limit: int | None) -> Table:
    most = math.inf if limit is None else LONGEST_LINE
    return _collect(partial(_text_rows, most=most), source, file, limit)


def _require_names(source: str, header: Sequence[str], mark: str) -> None:
    if not header:
        raise DatasetError(f"{source}: is empty")
    others = [each for each in ",;\t|" if each in header[0] and each != mark]
    if len(header) == 1 and others:
        raise _other_mark(source, others[0], mark)
    names = {name.strip() for name in header}
    # pandas writes its index as the first column, without a name.
    if "" in {name.strip() for name in header[1:]} or len(names) < len(header):
        shown = ", ".join(map(show, header[:10]))
        raise DatasetError(f"{source}: line 1: needs a different name for each column: {shown}")


def load_json(source: str, file: TextIO) -> Any:
    """Return what a file of JSON has. Raises :class:`DatasetError`."""
    text = file.read()
    try:
        return json.loads(text, object_pairs_hook=as_object)
    except RecursionError as error:
        raise DatasetError(f"{source}: is nested too deeply") from error
    except ValueError as error:
        raise DatasetError(f"{source}: is not JSON: {first_line(error)}") from error


def _read_json(source: str, file: TextIO, limit: int | None) -> Table:
    if stream := find_stream(".json", file):
        return _collect(stream, source, file, limit)
    document = load_json(source, file)
    found = document.get("data") if isinstance(document, dict) else document
    if not isinstance(found, list):
        raise DatasetError(
            f"{source}: is not a list of objects, nor an object with such a list as 'data'"
        )

    def rows(*_: object) -> Iterator[Found]:
        for number, row in enumerate(found, start=1):
            place = f"{source}: row {number}"
            yield number, row if isinstance(row, dict) else DatasetError(f"{place}: {_NO_OBJECT}")

    return _collect(rows, source, file, limit)._replace(unit="row")


def _is_json_lines(file: TextIO) -> bool:
    line = file.readline(LONGEST_LINE)
    file.seek(0)
    try:
        found = json.loads(line) if line.lstrip().startswith("{") else None
        return isinstance(found, dict) and not isinstance(found.get("data"), list)
    except (ValueError, RecursionError):
        return False


def _conll_rows(source: str, file: TextIO) -> Iterator[Found]:
    """Yield sentences: a word per line, its tag in the last column, and an empty line after each.

    Only between tabs, words may have spaces. Lines that begin with "# " are comments before a sentence.
    """
    words, tags, is_whole = list[str](), list[str](), True
    every = (line for _, line in _lines(source, file) if line.strip(_BLANKS))
    first = next((line for line in every if not line.startswith(("#", "-DOCSTART-"))), "")
    file.seek(0)
    separator = "\t" if "\t" in first.strip(_BLANKS) else "[ \t]+"
    width, start = len(re.split(separator, first.strip(_BLANKS))), 0
    for number, line in chain(_lines(source, file), [(0, "")]):
        text = line.strip("\r\n" if separator == "\t" else _BLANKS)
        cells = re.split(separator, text) if text.strip(_BLANKS) else []
        if cells and line.startswith("# ") and len(cells) != width:
            continue
        if not cells or cells[0] == "-DOCSTART-":
            if words and is_whole:
                yield start, {"words": words, "tags": tags}
            words, tags, is_whole = [], [], True
            continue
        problem = ""
        if len(cells) < 2:
            problem = f"has a word and no tag: {show(cells[0])}"
        elif separator != "\t" and len(cells) != width:
            problem = f"has {len(cells)} columns, and the first word {width}"
        elif separator != "\t" and cells[0] == "#" and not words:
            problem = "may be a comment, or the word '#'"
        if problem:
            is_whole, hint = False, "separate the columns with tabs" if len(cells) > 1 else None
            yield number, DatasetError(f"{source}: line {number}: {problem}", hint=hint)
        start = start if words else number
        words.append(cells[0])
        tags.append(cells[-1])


def _read_conll(source: str, file: TextIO, limit: int | None) -> Table:
    table = _collect(_conll_rows, source, file, limit)
    starts = (" ".join(row["words"][:2]) for row in table.rows)
    if table.rows and all(re.fullmatch(r"1(-\d+)?( [12](-\d+)?)?", start) for start in starts):
        raise DatasetError(
            f"{source}: its first column numbers the words",
            hint="remove that column: tag reads the word first and its tag last",
        )
    return table._replace(columns=("words", "tags"))


STREAMS: dict[str, Stream] = {
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, mark="\t"),
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".txt": _text_rows,
}


def find_stream(kind: str, file: TextIO) -> Stream | None:
    """Return what reads a file row by row, if its format, such as ``.csv``, allows that."""
    is_lines = kind == ".json" and _is_json_lines(file)
    return STREAMS.get(".jsonl" if is_lines else kind)


READERS: dict[str, Callable[[str, TextIO, int | None], Table]] = {
    **{name: partial(_collect, stream) for name, stream in STREAMS.items()},
    ".txt": _read_text,
    ".json": _read_json,
    ".conll": _read_conll,
    ".parquet": lambda *_: Table("", (), []),
}
