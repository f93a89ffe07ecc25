"""Data that are larger than the memory: Arrow files on the node's disk, mapped by all of its ranks.

``datasets`` is not used here. For 200,000 rows (334 MB), it takes 4.2 s to import and open instead of 0.4 s,
11 s to read all rows instead of 1.2 s, and 472 MB of memory instead of 402 MB [two busy cores, 2026-11].
It also silently drops a column that the first rows do not have. Rows of text files are kept as JSON,
because Arrow's types change values (1.5 after whole numbers) and drop an object's later names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, overload

from ..runtime.errors import LARGER_DISKS, MORE_SPACE, DatasetError
from ..runtime.output import hold_lock, new_file
from ..runtime.process import has_supervisor

TOGETHER = 10_000
"""Rows of an Arrow batch."""
LINE, ROW, NAMES, PROBLEM = "\0line", "\0row", "\0names", "\0problem"
"""A text file's columns: each row's line, the row as JSON, its new columns, and why it can't be used."""
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


class MappedRows(Sequence[Any]):
    """The rows of an Arrow file; ``lines`` are those of the original file, if it has lines."""

    def __init__(self, path: Path) -> None:
        import pyarrow  # noqa: PLC0415 - the laptop may have none

        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        self.lines: Sequence[int] = ()
        self.columns = tuple(table.column_names)
        if LINE in self.columns:
            self.lines = Lazy(table.column(LINE), lambda _, value: value.as_py())
            names = table.column(NAMES).drop_null().to_pylist()
            self.columns = tuple(chain.from_iterable(map(json.loads, names)))
            table = table.select([ROW, PROBLEM])
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        (row,) = map(_decode, self._table.slice(range(len(self))[index], 1).to_pylist())
        return row

    def __iter__(self) -> Iterator[Any]:
        rows = chain.from_iterable(each.to_pylist() for each in self._table.to_batches())
        return map(_decode, rows)


def map_rows(
    path: Path, files: Sequence[Path], folder: Path, write: Callable[[Path], None]
) -> MappedRows:
    """Return the rows of a place's files from an Arrow file in a folder; ``write`` makes a missing one.

    Only one process of the node makes it, and the others wait. Raises :class:`DatasetError`.
    """
    found = [(str(each.resolve()), each.stat()) for each in files]
    states = ((name, known.st_size, known.st_mtime_ns) for name, known in found)
    text = str([3, str(path.resolve()), *states])
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
        more = LARGER_DISKS if has_supervisor() else f"it needs {MORE_SPACE}"
        hint = more if error.errno == errno.ENOSPC else None
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
    """Write rows, or why they can't be used, with their lines. Raises :class:`DatasetError` for no rows."""
    import pyarrow  # noqa: PLC0415 - the laptop may have none

    types = {LINE: pyarrow.int64(), ROW: pyarrow.large_binary(), NAMES: pyarrow.string()}
    schema = pyarrow.schema([*types.items(), (PROBLEM, pyarrow.string())])
    known, is_empty = dict[str, None](), True
    with pyarrow.OSFile(str(target), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        while some := [_encode(*each, known) for each in islice(found, TOGETHER)]:
            writer.write_batch(pyarrow.RecordBatch.from_pylist(some, schema=schema))
            is_empty = False
    if is_empty:
        raise DatasetError(f"{source}: has no rows")


def _encode(
    line: int, row: Mapping[str, Any] | DatasetError, known: dict[str, None]
) -> dict[str, Any]:
    """Return what is written of a row; ``known`` are the columns of earlier ones."""
    if isinstance(row, DatasetError):
        return {LINE: line, PROBLEM: row.message}
    new = [name for name in row if name not in known]
    known.update(dict.fromkeys(new))
    # JSON may have half of a surrogate pair, which only the task can refuse.
    text = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return {LINE: line, ROW: text, NAMES: json.dumps(new) if new else None}


def _decode(row: dict[str, Any]) -> Any:
    return json.loads(row[ROW]) if row.get(ROW) is not None else row
