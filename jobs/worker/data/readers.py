"""Tables from files: CSV, TSV, JSON, JSON lines, and Parquet, each also gzipped; and from ``datasets``.

The laptop reads the same files with the same code before anything is sent. It needs pyarrow only for Parquet;
folders of ``save_to_disk`` and names on the hub need ``datasets``, which only the nodes have. There, the rows
of large files stay on the disk.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from ..runtime.errors import DatasetError, first_line, hub_hint
from .mapped import PROBLEM, TOGETHER, Lazy, map_rows, write_rows
from .records import as_object, noting, refusal, show, why_not_utf8

LONGEST_LINE = 1 << 24
"""Characters: a longer line is no record, but a file with other contents."""
MOST_IN_MEMORY = 256 << 20
"""Bytes, in text, of a file that is read into memory; :mod:`.mapped` has the rows of larger ones."""
_UNZIPPED = 4
"""How many times as large a gzipped text is assumed to be."""
MOST_CHECKED, _LOOK_AT = 64 << 20, 1000
"""Bytes, in text, of data that the laptop checks completely, and the rows that it checks of larger ones."""
TRAIN, EVAL = "train", "eval"
_BLANKS = " \t\r\n"
_EVAL_NAMES = ("validation", "eval", "dev", "test")
_NO_OBJECT = "is not an object with a value for each column"
_FORMATS = "CSV, TSV, JSON, JSON lines, or Parquet, also gzipped"

Row = Mapping[str, Any]
Record = TypeVar("Record")


def is_small(place: str) -> bool:
    """Return whether this machine reads all of a file or folder in little time."""
    path = Path(place)
    files = [each for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file()]
    names = {name for each in files for name in (each.name, each.suffix.lower())}
    libraries = {"pyarrow": {".parquet"}, "datasets": {"dataset_dict.json", "dataset_info.json"}}
    if any(names & needs and not find_spec(name) for name, needs in libraries.items()):
        return False
    size = sum(map(_size_as_text, files))
    return bool(files) and size <= MOST_CHECKED


def _size_as_text(path: Path) -> int:
    return path.stat().st_size * (_UNZIPPED if path.suffix.lower() in (".gz", ".parquet") else 1)


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


def read_table(
    place: str, split: str = TRAIN, limit: int | None = None, mapped: Path | None = None
) -> Table:
    """Return the table of a file, or of a folder's or hub data set's split; of a file, the first rows.

    ``mapped`` is the folder for the rows of large files, if they may not be in memory. Raises
    :class:`DatasetError`.
    """
    path = Path(place)
    if path.is_dir():
        return _read_folder(path, split, mapped)
    if path.exists() or path.suffix.lower() in {*READERS, ".gz"}:
        return _read_file(path, limit, mapped)
    return _from_splits(place, _load_hub(place), split)


@contextmanager
def first_rows(place: str) -> Iterator[Table]:
    """Give the table of a file, of a large one the first rows; then, errors say so."""
    limit = None if is_small(place) else _LOOK_AT
    try:
        yield read_table(place, limit=limit)
    except DatasetError as error:
        error.message += f"; only the first {limit:,} rows were checked" if limit else ""
        raise


def _read_file(path: Path, limit: int | None = None, mapped: Path | None = None) -> Table:
    names = [suffix.lower() for suffix in path.suffixes]
    zipped = names[-1:] == [".gz"]
    kind = (names[-2:-1] if zipped else names[-1:]) or [""]
    if kind[0] not in READERS:
        raise DatasetError(
            f"{path}: its name does not say its format",
            hint=f"rename it: {_FORMATS} ({', '.join(READERS)}, with .gz)",
        )
    try:
        is_large = mapped is not None and _size_as_text(path) > MOST_IN_MEMORY
        if kind[0] == ".parquet":
            return _read_shards(path, [path], limit, mapped)
        opener: Callable[..., Any] = gzip.open if zipped else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            if mapped and is_large and kind[0] in STREAMS:
                rows = STREAMS[kind[0]](str(path), file)
                return _map(path, mapped, partial(write_rows, str(path), rows))
            table = READERS[kind[0]](str(path), file, limit)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: {why_not_utf8(error)}", hint="save it as UTF-8") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DatasetError(f"{path}: is not gzip, or is cut off: {first_line(error)}") from error
    except OSError as error:
        raise DatasetError(f"{path}: can't be read: {error.strerror or error}") from error
    if not table.rows:
        empty = DatasetError(f"{path}: has no rows")
        raise refusal(table.problems, has_good=False) if table.problems else empty
    return table


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


Found = tuple[int, "Row | DatasetError"]
"""A row, or the reason why it can't be used, and its line."""
Stream = Callable[[str, TextIO], Iterator[Found]]


def _csv_rows(source: str, file: TextIO, mark: str = ",") -> Iterator[Found]:
    """Yield the rows; the first one has the columns' names."""
    is_plain, header = mark == "\t" and _is_plain(source, file), list[str]()
    for at, cells, _ in _csv_records(source, file, mark, is_plain):
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
        raise DatasetError(f"{source}: line {at}: is not CSV: {error}") from error


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


def _text_rows(source: str, file: TextIO) -> Iterator[Found]:
    """Yield texts that are separated by empty lines, as the column ``text``."""
    lines, first = list[str](), 0
    for number, line in chain(_lines(source, file), [(0, "")]):
        if line.strip():
            first = first if lines else number
            lines.append(line.rstrip("\r\n"))
        elif lines:
            yield first, {"text": "\n".join(lines)}
            lines = []


def _collect(stream: Stream, source: str, file: TextIO, limit: int | None) -> Table:
    rows, lines, problems = list[Row](), list[int](), list[DatasetError]()
    for line, row in islice(stream(source, file), limit):
        if isinstance(row, DatasetError):
            problems.append(row)
        else:
            rows.append(row)
            lines.append(line)
    return Table(source, _columns(rows), rows, lines, problems)


def _require_names(source: str, header: Sequence[str], mark: str) -> None:
    if not header:
        raise DatasetError(f"{source}: is empty")
    others = [each for each in ",;\t|" if each in header[0] and each != mark]
    if len(header) == 1 and others:
        what = f"its columns are separated by {others[0]!r}, not {mark!r}"
        raise DatasetError(
            f"{source}: line 1: {what}", hint="save it as CSV with commas, or as TSV"
        )
    names = {name.strip() for name in header}
    # pandas writes its index as the first column, without a name.
    if "" in {name.strip() for name in header[1:]} or len(names) < len(header):
        shown = ", ".join(map(show, header[:10]))
        raise DatasetError(f"{source}: line 1: needs a different name for each column: {shown}")


def _read_json(source: str, file: TextIO, limit: int | None) -> Table:
    start = file.read(1 << 10).lstrip()
    file.seek(0)
    if start.startswith("{") and _is_json_lines(file):
        return _collect(_jsonl_rows, source, file, limit)
    try:
        document = json.loads(file.read(), object_pairs_hook=as_object)
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
        if isinstance(row, dict):
            rows.append(row)
        else:
            problems.append(DatasetError(f"{source}: row {number}: {_NO_OBJECT}"))
    return Table(source, _columns(rows), rows, (), problems)


def _is_json_lines(file: TextIO) -> bool:
    line = file.readline(LONGEST_LINE)
    file.seek(0)
    try:
        found = json.loads(line)
        return isinstance(found, dict) and "data" not in found
    except (ValueError, RecursionError):
        return False


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in row))


def _read_conll(source: str, file: TextIO, limit: int | None) -> Table:
    """Read a word per line, its tag in the last column, and an empty line after each sentence.

    Only between tabs, words may have spaces. Lines that begin with "# " are comments before a sentence.
    """
    rows, places = list[Row](), list[int]()
    words, tags = list[str](), list[str]()
    problems = list[DatasetError]()

    def end(number: int) -> None:
        if words:
            rows.append({"words": list(words), "tags": list(tags)})
            places.append(number - len(words))
        words.clear()
        tags.clear()

    every = (line for _, line in _lines(source, file) if line.strip(_BLANKS))
    first = next((line for line in every if not line.startswith(("#", "-DOCSTART-"))), "")
    file.seek(0)
    separator = "\t" if "\t" in first.strip(_BLANKS) else "[ \t]+"
    width, number = len(re.split(separator, first.strip(_BLANKS))), 0
    for number, line in _lines(source, file):
        text = line.strip("\r\n" if separator == "\t" else _BLANKS)
        cells = re.split(separator, text) if text.strip(_BLANKS) else []
        if cells and line.startswith("# ") and len(cells) != width:
            continue
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
            if separator != "\t" and (len(cells) != width or (cells[0] == "#" and not words)):
                raise DatasetError(
                    f"{source}: line {number}: has {len(cells)} columns, and the first word {width}"
                    if len(cells) != width
                    else f"{source}: line {number}: may be a comment, or the word '#'",
                    hint="separate the columns with tabs",
                )
            words.append(cells[0])
            tags.append(cells[-1])
    end(number + 1)
    starts = (" ".join(row["words"][:2]) for row in rows)
    if rows and all(re.fullmatch(r"1(-\d+)?( [12](-\d+)?)?", start) for start in starts):
        raise DatasetError(
            f"{source}: its first column numbers the words",
            hint="remove that column: tag reads the word first and its tag last",
        )
    return Table(source, ("words", "tags"), rows, places, problems)


def _read_shards(
    place: Path, paths: Sequence[Path], limit: int | None, mapped: Path | None
) -> Table:
    """Return the rows of Parquet files with the same columns; ``place`` is the file, or their folder."""
    if find_spec("pyarrow") is None:
        return _look_at_parquet(paths)
    from pyarrow import ArrowException  # noqa: PLC0415 - the laptop may have none
    from pyarrow.parquet import ParquetFile, read_schema  # noqa: PLC0415

    path, rows = paths[0], list[Row]()
    try:
        names = read_schema(path).names
        if len({*names}) < len(names):
            raise DatasetError(f"{path}: has two columns of the same name")
        for path in paths:
            if read_schema(path).names != names:
                raise DatasetError(f"{path}: has other columns than {paths[0].name}")
        if mapped and sum(map(_size_as_text, paths)) > MOST_IN_MEMORY:
            return _map(place, mapped, partial(_write_arrow, paths))
        for path in paths:
            with ParquetFile(path) as file:
                rows += file.read().slice(0, limit).to_pylist()
    except (ArrowException, OSError) as error:
        raise DatasetError(f"{path}: can't be read as Parquet: {first_line(error)}") from error
    if not rows:
        raise DatasetError(f"{place}: has no rows")
    return Table(str(place), tuple(names), rows)


def _map(path: Path, folder: Path, write: Callable[[Path], None]) -> Table:
    found = map_rows(path, folder, write)
    return Table(str(path), found.columns, found, found.lines)


def _write_arrow(paths: Sequence[Path], target: Path) -> None:
    from pyarrow import OSFile, ipc  # noqa: PLC0415 - the laptop may have none
    from pyarrow.parquet import ParquetFile, read_schema  # noqa: PLC0415

    schema = read_schema(paths[0])
    with OSFile(str(target), "wb") as out, ipc.new_file(out, schema) as writer:
        for path in paths:
            with ParquetFile(path) as file:
                for batch in file.iter_batches(TOGETHER):
                    writer.write_batch(batch)


def _look_at_parquet(paths: Sequence[Path]) -> Table:
    """Check the files' first and last bytes; the nodes check their columns."""
    for path in paths:
        content = path.read_bytes()
        if len(content) < 12 or (content[:4], content[-4:]) != (b"PAR1", b"PAR1"):
            raise DatasetError(f"{path}: is not Parquet, or is cut off")
    return Table(str(paths[0]), (), [])


def _read_folder(path: Path, split: str, mapped: Path | None) -> Table:
    if any((path / name).exists() for name in ("dataset_dict.json", "dataset_info.json")):
        return _from_splits(str(path), _load_saved(path), split)
    files = sorted(each for each in path.iterdir() if each.is_file())
    wanted = (TRAIN,) if split == TRAIN else _EVAL_NAMES
    for name in wanted:
        found = [each for each in files if each.name.split(".")[0] == name]
        if found:
            return _read_file(found[0], mapped=mapped)
    shards = sorted(each for each in path.rglob("*.parquet") if each.is_file())
    uses = [re.split("[-_.]", each.name)[0] for each in shards]
    if split == TRAIN and not {*uses} & {TRAIN, *_EVAL_NAMES}:
        uses = [TRAIN] * len(shards)
    for name in wanted:
        if named := [each for each, use in zip(shards, uses, strict=True) if use == name]:
            return _read_shards(path, named, None, mapped)
    raise DatasetError(
        f"{path}: has no file for {split}: {' or '.join(wanted)}.csv, .jsonl, …",
        hint="give a file, or a folder that save_to_disk has written",
    )


def has_split(place: str, split: str, mapped: Path | None = None) -> bool:
    """Return whether a folder or hub data set has a split for this use; False for a file."""
    path = Path(place)
    if path.is_file():
        return False
    try:
        read_table(place, split, mapped=mapped)
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
    convert = {
        column: inner.int2str
        for column, feature in found.features.items()
        if hasattr(inner := getattr(feature, "feature", feature), "int2str")
    }

    def with_names(_: int, row: Row) -> Row:
        named = dict(row)
        for column, name in convert.items():
            value = row[column]
            named[column] = [*map(name, value)] if isinstance(value, list) else name(value)
        return named

    return Table(name, tuple(found.column_names), Lazy(found, with_names))


STREAMS: dict[str, Stream] = {
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, mark="\t"),
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".txt": _text_rows,
}
READERS: dict[str, Callable[[str, TextIO, int | None], Table]] = {
    **{name: partial(_collect, stream) for name, stream in STREAMS.items()},
    ".json": _read_json,
    ".conll": _read_conll,
    ".parquet": lambda *_: Table("", (), []),
}


def choose_column(table: Table, asked: str | None, known: Sequence[str], flag: str) -> str:
    """Return the column that the user named, or the first of the known names. Raises ``DatasetError``."""
    stripped = {name.strip(): name for name in reversed(table.columns)}
    for name in known if asked is None else (asked, asked.strip()):
        if name in table.columns or name in stripped:
            return name if name in table.columns else stripped[name]
    there = ", ".join(name or "one without a name" for name in table.columns)
    if asked is not None:
        raise DatasetError(f"{table.source}: has no column {asked!r}; it has {there}")
    if len(table.columns) == 1 and flag != "--text-column":
        raise DatasetError(
            f"{table.source}: has one column, {there}, and two are needed",
            hint="give CSV, JSON lines, or Parquet with a column for each",
        )
    raise DatasetError(f"{table.source}: which column? It has {there}", hint=f"name it with {flag}")


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
