"""Data that are larger than the memory: Arrow files on the node's disk, mapped by all of its ranks.

``datasets`` is not used here. For 200,000 rows (334 MB), it takes 4.2 s to import and open instead of 0.4 s,
11 s to read all rows instead of 0.6 s, and 472 MB of memory instead of 402 MB [two busy cores, 2026-11].
It also silently drops a column that the first rows do not have.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, overload

from ..runtime.errors import LARGER_DISKS, DatasetError, first_line
from ..runtime.output import hold_lock, new_file

TOGETHER = 10_000
"""Rows of an Arrow batch."""
LINE, PROBLEM = "\0line", "\0problem"
"""Columns with each row's line in the original file, and why it can't be used."""
_UNUSED, _STALE = 7 * 86400.0, 3600.0
"""Seconds since the last use of rows, and since the last change of an unfinished file."""

Value = TypeVar("Value")


class Lazy(Sequence[Value]):
    """``function(number, element)`` for the elements of a sequence, computed at each access.

    ``kept`` are the numbers of the elements that it has (default: all).
    """

    def __init__(
        self,
        source: Sequence[Any],
        function: Callable[[int, Any], Value],
        kept: Sequence[int] | None = None,
    ) -> None:
        self._source, self._function = source, function
        self._kept = range(len(source)) if kept is None else kept

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> Lazy[Value]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.choose(self._kept[index])
        number = self._kept[index]
        return self._function(number, self._source[number])

    def __iter__(self) -> Iterator[Value]:
        if self._kept == range(len(self._source)):  # reads many rows together
            return (self._function(*each) for each in enumerate(self._source))
        return (self._function(number, self._source[number]) for number in self._kept)

    def choose(self, numbers: Sequence[int]) -> Lazy[Value]:
        """Return those of these numbers in the original sequence."""
        return Lazy(self._source, self._function, numbers)


def map_table(path: Path) -> Any:
    """Return the table of an Arrow file; its values stay on the disk."""
    import pyarrow  # noqa: PLC0415 - the laptop may have none

    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


class MappedRows(Sequence[Any]):
    """The rows of an Arrow file; ``lines`` are those of the original file, if it has lines."""

    def __init__(self, path: Path) -> None:
        table = map_table(path)
        self.lines: Sequence[int] = ()
        if LINE in table.column_names:
            self.lines = Lazy(table.column(LINE), lambda _, value: value.as_py())
            table = table.drop_columns([LINE])
        self.columns = tuple(name for name in table.column_names if name != PROBLEM)
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        (row,) = self._table.slice(range(len(self))[index], 1).to_pylist()
        return row

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(each.to_pylist() for each in self._table.to_batches())


def map_rows(path: Path, folder: Path, write: Callable[[Path], None]) -> MappedRows:
    """Return a file's rows from its Arrow file in a folder; ``write`` makes that if there is none.

    Only one process of the node makes it, and the others wait. Raises :class:`DatasetError`.
    """
    known = path.stat()
    text = f"{path.resolve()} {known.st_size} {known.st_mtime_ns}"
    target = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            # Without locks, each process makes the file. The first one stays: others may have mapped it.
            hold_lock(lock)
            if not target.exists():
                remove_unused(folder)
                with new_file(target, process_suffix(), replace=False) as partial:
                    write(partial)
            os.utime(target)
            return MappedRows(target)
    except OSError as error:
        why = f"its rows can't be kept in {folder}: {error.strerror or error}"
        hint = LARGER_DISKS if error.errno == errno.ENOSPC else None
        raise DatasetError(f"{path}: {why}", hint=hint) from error


def process_suffix() -> str:
    """Return a suffix that no other process has: nodes may share the folder, but not its locks."""
    return f".{socket.gethostname()}-{os.getpid()}"


def remove_unused(folder: Path) -> None:
    """Remove rows that no job has used for a week, and unfinished files of failed jobs."""
    for pattern, seconds in (("*.arrow", _UNUSED), ("*.lock", _UNUSED), (".*.partial", _STALE)):
        for path in folder.glob(pattern):
            # Another job may remove files at the same time.
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - seconds:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_rows(
    source: str, found: Iterator[tuple[int, Mapping[str, Any] | DatasetError]], target: Path
) -> None:
    """Write rows, or why they can't be used, with their lines as an Arrow file. Raises :class:`DatasetError`.

    Each column has the type that it has in the first rows.
    """
    import pyarrow  # noqa: PLC0415 - the laptop may have none

    schema: Any = None
    writer: Any = None
    lines: list[int] = []
    try:
        with pyarrow.OSFile(str(target), "wb") as file:
            while some := list(islice(found, TOGETHER)):
                lines = [line for line, _ in some]
                rows = [_with_line(*each) for each in some]
                if schema is None:
                    schema = _find_schema(rows)
                    writer = pyarrow.ipc.new_file(file, schema)
                for line, row in zip(lines, rows, strict=True):
                    if new := row.keys() - {*schema.names}:
                        which = f"has a column {min(new)!r}, which the first rows lack"
                        raise DatasetError(f"{source}: line {line}: {which}")
                writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
            if writer is None:
                raise DatasetError(f"{source}: has no rows")
            writer.close()
    except (pyarrow.ArrowException, TypeError) as error:
        raise DatasetError(
            f"{source}: lines {lines[0]} to {lines[-1]}: {first_line(error)}",
            hint="in a file of this size, a column must have one type",
        ) from error


def _with_line(line: int, row: Mapping[str, Any] | DatasetError) -> dict[str, Any]:
    return {LINE: line, **({PROBLEM: row.message} if isinstance(row, DatasetError) else row)}


def _find_schema(rows: Sequence[dict[str, Any]]) -> Any:
    import pyarrow  # noqa: PLC0415 - the laptop may have none

    names = dict.fromkeys([PROBLEM, *chain.from_iterable(rows)])
    schema = pyarrow.Table.from_pylist([{**names, **row} for row in rows]).schema
    for number, each in enumerate(schema):
        if pyarrow.types.is_null(each.type):
            schema = schema.set(number, each.with_type(pyarrow.string()))
    return schema
