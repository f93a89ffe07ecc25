"""Tables from files: CSV, TSV, JSON, JSON lines, and Parquet, each also gzipped; and from ``datasets``.

The laptop reads the same files with the same code before anything is sent. It needs pyarrow only for Parquet;
folders of ``save_to_disk`` and names on the hub need ``datasets``, which only the nodes have.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from ..runtime.errors import DatasetError, first_line, hub_hint
from .records import noting, refusal, show

LONGEST_LINE = 1 << 24
"""Characters: a longer line is no record, but a file with other contents."""
TRAIN, EVAL = "train", "eval"
_EVAL_NAMES = ("validation", "eval", "dev", "test")
_FORMATS = "CSV, TSV, JSON, JSON lines, or Parquet, also gzipped"

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

    def place(self, row: int) -> str:
        """Return where a row is, such as "train.csv: line 7"."""
        return (
            f"{self.source}: line {self.lines[row]}"
            if self.lines
            else f"{self.source}: row {row + 1}"
        )


def read_table(place: str, split: str = TRAIN, limit: int | None = None) -> Table:
    """Return the table of a file, or of a folder's or hub data set's split; of a file, the first rows.

    Raises :class:`DatasetError`.
    """
    path = Path(place)
    if path.is_dir():
        return _read_folder(path, split)
    if path.exists() or path.suffix.lower() in {*READERS, ".gz"}:
        return _read_file(path, limit)
    return _from_splits(place, _load_hub(place), split)


def _read_file(path: Path, limit: int | None = None) -> Table:
    names = [suffix.lower() for suffix in path.suffixes]
    zipped = names[-1:] == [".gz"]
    kind = (names[-2:-1] if zipped else names[-1:]) or [""]
    if kind[0] not in READERS:
        raise DatasetError(
            f"{path}: its name does not say its format",
            hint=f"rename it: {_FORMATS} ({', '.join(READERS)}, with .gz)",
        )
    try:
        if kind[0] == ".parquet":
            return _read_parquet(path, limit)
        opener: Callable[..., Any] = gzip.open if zipped else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            table = READERS[kind[0]](str(path), file, limit)
    except UnicodeDecodeError as error:
        byte = f"a byte {error.object[error.start]:#04x}, {error.reason}"
        raise DatasetError(f"{path}: is not UTF-8 ({byte})") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DatasetError(f"{path}: is not gzip, or is cut off: {first_line(error)}") from error
    except OSError as error:
        raise DatasetError(f"{path}: can't be read: {error.strerror or error}") from error
    if not table.rows:
        raise refusal(table.problems) if table.problems else DatasetError(f"{path}: has no rows")
    return table


def _all_lines(source: str, file: TextIO) -> Iterator[tuple[int, str]]:
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise DatasetError(f"{source}: line {number}: is longer than {LONGEST_LINE} characters")
        if not line:
            return
        yield number, line


def _lines(source: str, file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield the nonblank lines with their numbers."""
    for number, line in _all_lines(source, file):
        if "\0" in line:
            raise DatasetError(f"{source}: line {number}: contains NUL bytes")
        if line.strip():
            yield number, line


def _read_csv(source: str, file: TextIO, limit: int | None, mark: str = ",") -> Table:
    at = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for at, line in _lines(source, file):  # noqa: B007 - the reader takes several for a quoted one
            yield line

    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(lines(), delimiter=mark, strict=True)
    rows, places, problems = list[Row](), list[int](), list[DatasetError]()
    try:
        header = [name.strip() for name in next(reader, [])]
        _require_names(source, header)
        for cells in islice(reader, limit):
            with noting(problems):
                if len(cells) != len(header):
                    raise DatasetError(
                        f"{source}: line {at}: has {len(cells)} columns, and the first line {len(header)}"
                    )
                rows.append(dict(zip(header, cells, strict=True)))
                places.append(at)
    except csv.Error as error:
        raise DatasetError(f"{source}: line {at}: is not CSV: {error}") from error
    return Table(source, tuple(header), rows, places, problems)


def _require_names(source: str, header: Sequence[str]) -> None:
    if not header:
        raise DatasetError(f"{source}: is empty")
    if "" in header or len(set(header)) < len(header):
        shown = ", ".join(map(show, header[:10]))
        raise DatasetError(f"{source}: line 1: needs a different name for each column: {shown}")


def _read_json(source: str, file: TextIO, limit: int | None) -> Table:
    start = file.read(1 << 10).lstrip()
    file.seek(0)
    if start.startswith("{") and _is_json_lines(file):
        return _read_jsonl(source, file, limit)
    try:
        document = json.loads(file.read())
    except RecursionError as error:
        raise DatasetError(f"{source}: is nested too deeply") from error
    except ValueError as error:
        raise DatasetError(f"{source}: is not JSON: {first_line(error)}") from error
    found = document.get("data") if isinstance(document, dict) else document
    if not isinstance(found, list):
        raise DatasetError(
            f"{source}: is not a list of objects, nor an object with such a list as 'data'"
        )
    rows, problems = list[Row](), list[DatasetError]()
    for number, row in enumerate(found[:limit], start=1):
        with noting(problems):
            rows.append(_object(f"{source}: row {number}", row))
    return Table(source, _columns(rows), rows, (), problems)


def _is_json_lines(file: TextIO) -> bool:
    line = file.readline(LONGEST_LINE)
    file.seek(0)
    try:
        found = json.loads(line)
        return isinstance(found, dict) and "data" not in found
    except (ValueError, RecursionError):
        return False


def _read_jsonl(source: str, file: TextIO, limit: int | None) -> Table:
    rows, places, problems = list[Row](), list[int](), list[DatasetError]()
    for number, line in islice(_lines(source, file), limit):
        with noting(problems):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DatasetError(
                    f"{source}: line {number}: is not JSON: {first_line(error)}"
                ) from error
            rows.append(_object(f"{source}: line {number}", found))
            places.append(number)
    return Table(source, _columns(rows), rows, places, problems)


def _object(place: str, found: Any) -> Row:
    if not isinstance(found, dict):
        raise DatasetError(f"{place}: is not an object with a value for each column")
    return found


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in row))


def _read_conll(source: str, file: TextIO, limit: int | None) -> Table:
    """Read a word per line, its tag in the last column, and an empty line after each sentence."""
    rows, places = list[Row](), list[int]()
    words, tags = list[str](), list[str]()
    problems = list[DatasetError]()

    def end(number: int) -> None:
        if words:
            rows.append({"words": list(words), "tags": list(tags)})
            places.append(number - len(words))
        words.clear()
        tags.clear()

    number = 0
    for number, line in _all_lines(source, file):
        cells = line.split()
        if not cells or cells[0] == "-DOCSTART-":
            end(number)
            if limit is not None and len(rows) >= limit:
                break
            continue
        with noting(problems):
            if len(cells) < 2:
                raise DatasetError(
                    f"{source}: line {number}: has a word and no tag: {show(cells[0])}"
                )
            words.append(cells[0])
            tags.append(cells[-1])
    end(number + 1)
    return Table(source, ("words", "tags"), rows, places, problems)


def _read_text(source: str, file: TextIO, limit: int | None) -> Table:
    """Read texts that are separated by empty lines, as the column ``text``."""
    rows, places, lines = list[Row](), list[int](), list[str]()
    for number, line in _all_lines(source, file):
        if line.strip():
            if not lines:
                if len(rows) == limit:
                    break
                rows.append({})
                places.append(number)
            lines.append(line)
            rows[-1] = {"text": "".join(lines).rstrip()}
        else:
            lines.clear()
    return Table(source, ("text",), rows, places)


def _read_parquet(path: Path, limit: int | None) -> Table:
    if find_spec("pyarrow") is None:
        return _look_at_parquet(path)
    from pyarrow import ArrowException  # noqa: PLC0415 - the laptop may have none
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415

    try:
        with ParquetFile(path) as file:
            names = tuple(file.schema_arrow.names)
            rows = file.read().slice(0, limit).to_pylist()
    except (ArrowException, OSError) as error:
        raise DatasetError(f"{path}: can't be read as Parquet: {first_line(error)}") from error
    if not rows:
        raise DatasetError(f"{path}: has no rows")
    return Table(str(path), names, rows)


def _look_at_parquet(path: Path) -> Table:
    """Check the file's first and last bytes; the nodes check its columns."""
    content = path.read_bytes()
    if len(content) < 12 or (content[:4], content[-4:]) != (b"PAR1", b"PAR1"):
        raise DatasetError(f"{path}: is not Parquet, or is cut off")
    return Table(str(path), (), [])


def _read_folder(path: Path, split: str) -> Table:
    if any((path / name).exists() for name in ("dataset_dict.json", "dataset_info.json")):
        return _from_splits(str(path), _load_saved(path), split)
    files = sorted(each for each in path.iterdir() if each.is_file())
    wanted = (TRAIN,) if split == TRAIN else _EVAL_NAMES
    for name in wanted:
        found = [each for each in files if each.name.split(".")[0] == name]
        if found:
            return _read_file(found[0])
    raise DatasetError(
        f"{path}: has no file for {split}: {' or '.join(wanted)}.csv, .jsonl, …",
        hint="give a file, or a folder that save_to_disk has written",
    )


def has_split(place: str, split: str) -> bool:
    """Return whether a folder or hub data set has a split for this use; False for a file."""
    path = Path(place)
    if path.is_file():
        return False
    try:
        read_table(place, split)
    except DatasetError:
        return False
    return True


def _load_saved(path: Path) -> Any:
    try:
        from datasets import load_from_disk  # noqa: PLC0415 - only the nodes have it

        return load_from_disk(str(path))
    # The library raises many types.
    except Exception as error:
        raise DatasetError(f"{path}: can't be read by datasets: {first_line(error)}") from error


def _load_hub(name: str) -> Any:
    try:
        from datasets import load_dataset  # noqa: PLC0415 - only the nodes have it

        return load_dataset(name)
    # The library raises many types, among them those of requests, the hub, and pyarrow.
    except Exception as error:
        raise DatasetError(
            f"data {name!r} is no file or folder, and can't be loaded from the hub: {first_line(error)}",
            hint=hub_hint(
                error,
                name,
                "give a file with --data, or check the name and the network",
                "datasets/",
            ),
        ) from error


def _from_splits(name: str, found: Any, split: str) -> Table:
    """Return one split of ``datasets``' result, with class numbers replaced by class names."""
    if not hasattr(found, "features"):  # a dictionary of splits
        wanted = (TRAIN,) if split == TRAIN else _EVAL_NAMES
        chosen = next((each for each in wanted if each in found), None)
        if chosen is None:
            raise DatasetError(
                f"{name}: has no split {' or '.join(wanted)}, but {', '.join(found)}"
            )
        found, name = found[chosen], f"{name} ({chosen})"
    elif split != TRAIN:
        raise DatasetError(f"{name}: has one split, which is for training")
    rows = [dict(row) for row in found]
    for column, feature in found.features.items():
        inner = getattr(feature, "feature", feature)
        convert = getattr(inner, "int2str", None)
        if convert is None:
            continue
        for row in rows:
            value = row[column]
            row[column] = (
                [convert(each) for each in value] if isinstance(value, list) else convert(value)
            )
    return Table(name, tuple(found.column_names), rows)


READERS: dict[str, Callable[[str, TextIO, int | None], Table]] = {
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, mark="\t"),
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".conll": _read_conll,
    ".txt": _read_text,
    ".parquet": lambda *_: Table("", (), []),
}


def choose_column(table: Table, asked: str | None, known: Sequence[str], flag: str) -> str:
    """Return the column that the user named, or the first of the known names. Raises ``DatasetError``."""
    if asked is not None and asked in table.columns:
        return asked
    found = next((name for name in known if name in table.columns), None)
    if asked is None and found is not None:
        return found
    there = ", ".join(table.columns)
    if asked is not None:
        raise DatasetError(f"{table.source}: has no column {asked!r}; it has {there}")
    raise DatasetError(f"{table.source}: which column? It has {there}", hint=f"name it with {flag}")


def read_records(
    table: Table, convert: Callable[[str, Row], Record], skipped: list[DatasetError] | None
) -> list[Record]:
    """Return each row as a record. ``convert`` gets its place and the row, and raises :class:`DatasetError`.

    A bad row is an error; with a list ``skipped``, it is left out and added to the list.
    """
    problems, records = list(table.problems), list[Record]()
    for number, row in enumerate(table.rows):
        with noting(problems):
            records.append(convert(table.place(number), row))
    if problems and (skipped is None or not records):
        raise refusal(problems)
    if not records:
        raise DatasetError(f"{table.source}: has no rows")
    if skipped is not None:
        skipped += problems
    return records
