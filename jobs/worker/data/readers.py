"""Tables from files: CSV, TSV, JSON, JSON lines, and Parquet, each also gzipped; and from ``datasets``.

The laptop reads the same files with the same code before anything is sent. It needs pyarrow only for Parquet;
folders of ``save_to_disk`` and names on the hub need ``datasets``, which only the nodes have. There, the rows
of large files stay on the disk.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from os import SEEK_END
from pathlib import Path
from typing import Any

from ..runtime.errors import DatasetError, first_line, hub_hint
from .mapped import Lazy, map_rows, write_rows
from .records import refusal, why_not_utf8
from .table import Row, Table
from .text_files import READERS, find_stream

MOST_IN_MEMORY = 256 << 20
"""Bytes, in text, of a file that is read into memory; :mod:`.mapped` has the rows of larger ones."""
_UNZIPPED = 4
"""How many times as large a gzipped text is assumed to be."""
MOST_CHECKED, _LOOK_AT = 64 << 20, 1000
"""Bytes, in text, of data that the laptop checks completely, and the rows that it checks of larger ones."""
TRAIN, EVAL = "train", "eval"
_NAMES = {TRAIN: (TRAIN,), EVAL: ("validation", "valid", "val", "eval", "dev", "test")}
"""The names of files and splits, by their use."""
_OTHER_PACKERS = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".br")
_FORMATS = "CSV, TSV, JSON, JSON lines, or Parquet, also gzipped"


class NoSplitError(DatasetError):
    """A folder or data set has nothing for a use."""


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
    what = f"data {place!r} is no file or folder, and"
    fix = "give a file with --data, or check the name and the network"
    return _from_splits(place, load_hub(place, what, fix), split)


def _size_as_text(path: Path) -> int:
    return path.stat().st_size * (_UNZIPPED if path.suffix.lower() in (".gz", ".parquet") else 1)


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
    with explaining(path):
        kind, opener = _format_of(path)
        is_large = mapped is not None and _size_as_text(path) > MOST_IN_MEMORY
        if kind == ".parquet":
            return _read_shards(path, [path], limit, mapped)
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            stream = find_stream(kind, file) if is_large else None
            if mapped and stream:
                rows = stream(str(path), file)
                return _map(path, [path], mapped, partial(write_rows, str(path), rows))
            table = READERS[kind](str(path), file, limit)
    if not table.rows:
        empty = DatasetError(f"{path}: has no rows")
        raise refusal(table.problems, has_good=False) if table.problems else empty
    return table


def stream_file(path: Path, first: int = 0) -> Iterator[tuple[str, Row | DatasetError]]:
    """Yield a file's rows from the ``first`` on, counted from 0, with their places, in constant memory.

    A row that can't be used is its error. CoNLL files, and JSON that is one list, are read whole. Raises
    :class:`DatasetError`.
    """
    with explaining(path):
        kind, opener = _format_of(path)
        if kind == ".parquet":
            from .parquet import stream_parquet  # noqa: PLC0415 - the laptop may have no pyarrow

            yield from stream_parquet(path, first)
            return
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            if stream := find_stream(kind, file):
                for line, row in islice(stream(str(path), file), first, None):
                    yield f"{path}: line {line}", row
                return
            table = READERS[kind](str(path), file, None)
    rows = ((table.place(number), row) for number, row in enumerate(table.rows))
    yield from islice(chain((("", each) for each in table.problems), rows), first, None)


def _format_of(path: Path) -> tuple[str, Callable[..., Any]]:
    """Return a file's format, such as ``.csv``, and what opens it."""
    kind, is_zipped = _kind_of(path)
    if kind not in READERS:
        how = "unpack it, or compress it with gzip" if kind in _OTHER_PACKERS else "rename it"
        raise DatasetError(
            f"{path}: its name does not say its format",
            hint=f"{how}: {_FORMATS} ({', '.join(READERS)}, with .gz)",
        )
    return kind, gzip.open if is_zipped else open


def _kind_of(path: Path) -> tuple[str, bool]:
    """Return a file's last suffix before ``.gz``, and whether it has that."""
    names = [suffix.lower() for suffix in path.suffixes]
    is_zipped = names[-1:] == [".gz"]
    return ((names[-2:-1] if is_zipped else names[-1:]) or [""])[0], is_zipped


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Raise :class:`DatasetError` for a file that can't be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: {why_not_utf8(error)}", hint="save it as UTF-8") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DatasetError(f"{path}: is not gzip, or is cut off: {first_line(error)}") from error
    except OSError as error:
        raise DatasetError(f"{path}: can't be read: {error.strerror or error}") from error


def _read_shards(
    place: Path, paths: Sequence[Path], limit: int | None, mapped: Path | None
) -> Table:
    """Return the rows of Parquet files with the same columns; ``place`` is the file, or their folder."""
    if find_spec("pyarrow") is None:
        return _look_at_parquet(paths)
    from . import parquet  # noqa: PLC0415 - the laptop may have no pyarrow

    schemas, rows, classes = list[Any](), list[Row](), dict[str, Sequence[str]]()
    files = parquet.find_partitions(place, paths)
    for file in files:
        path = file.path
        schemas.append(parquet.read_schema(file))
        parquet.require_names(path, schemas[-1])
        names, named = schemas[-1].names, parquet.class_names(schemas[-1])
        if {*names} != {*schemas[0].names}:
            raise DatasetError(f"{path}: has other columns than {paths[0].name}")
        if other := [each for each in named if named[each] != classes.get(each, named[each])]:
            raise DatasetError(
                f"{path}: column {other[0]!r} has other class names than earlier files"
            )
        classes |= named
    names = schemas[0].names
    if mapped and sum(map(_size_as_text, paths)) > MOST_IN_MEMORY:
        found = _map(place, paths, mapped, partial(parquet.write_arrow, place, files, schemas))
        return found._replace(classes=classes)
    for file, schema in zip(files, schemas, strict=True):
        with parquet.explaining_parquet(file.path):
            for table in parquet.read_tables(file, parquet.plain_schema(schema)):
                rows += table.to_pylist()
                if limit is not None and len(rows) >= limit:
                    break
    if not rows:
        raise DatasetError(f"{place}: has no rows")
    return Table(str(place), tuple(names), rows[:limit], classes=classes)


def _look_at_parquet(paths: Sequence[Path]) -> Table:
    """Check the files' first and last bytes; the nodes check their columns."""
    for path in paths:
        with path.open("rb") as file:
            marks, size = file.read(4), file.seek(0, SEEK_END)
            file.seek(max(0, size - 4))
            marks += file.read()
        if size < 12 or marks != b"PAR1PAR1":
            raise DatasetError(f"{path}: is not Parquet, or is cut off")
    return Table(str(paths[0]), (), [])


def _map(path: Path, files: Sequence[Path], folder: Path, write: Callable[[Path], None]) -> Table:
    found = map_rows(path, files, folder, write)
    return Table(str(path), found.columns, found, found.lines)


def _read_folder(path: Path, split: str, mapped: Path | None) -> Table:
    if _is_saved(path):
        return _from_splits(str(path), _load_saved(path), split)
    files = _find_files(path, split)
    if len(files) == 1 and "=" not in str(files[0].relative_to(path)):
        return _read_file(files[0], mapped=mapped)
    return _read_shards(path, files, None, mapped)


def _is_saved(path: Path) -> bool:
    return any((path / name).exists() for name in ("dataset_dict.json", "dataset_info.json"))


def _find_files(path: Path, split: str) -> Sequence[Path]:
    """Return a folder's file for a use, or its Parquet files. Raises :class:`DatasetError`."""
    files = _data_files(path)
    for name in _NAMES[split]:
        found = [each for each in files if each.name.split(".")[0].lower() == name]
        if len(found) > 1 and {each.suffix.lower() for each in found} != {".parquet"}:
            raise DatasetError(
                f"{path}: has several files for {split}: {', '.join(each.name for each in found)}",
                hint="put their rows into one file, and remove or rename the others",
            )
        if found:
            return found
    shards = {path / each: _use_of(each) for each in _visible_files(path, "*.parquet")}
    if not any(use for use, _ in shards.values()):
        shards = dict.fromkeys(shards, (TRAIN, ""))
    for name in _NAMES[split]:
        named = {each: group for each, (use, group) in shards.items() if use == name}
        if split == TRAIN and len(groups := sorted({*named.values()})) > 1:
            raise DatasetError(
                f"{path}: has several data sets for {split}, in {', '.join(groups)}",
                hint="give a folder that has only one of them",
            )
        if named:
            _require_all(path, named)
            return [*named]
    files = _visible_files(path, "*.*")
    near = next((each for each in files if _use_of(each)[0] in _NAMES[split]), None)
    other = next((each.relative_to(path) for each, (use, _) in shards.items() if not use), None)
    hint = "give a file, or a folder that save_to_disk has written"
    if near:
        hint = f"put the rows of {near}, … into one file with such a name"
    elif other:
        hint = f"if {other} is for {split}, move it into a folder {_NAMES[split][0]}"
    raise NoSplitError(
        f"{path}: has no file for {split}: {' or '.join(_NAMES[split])}.csv, .jsonl, …", hint=hint
    )


def _visible_files(path: Path, pattern: str) -> list[Path]:
    """Return the files in a folder, relative to it."""
    found = [each.relative_to(path) for each in sorted(path.rglob(pattern)) if each.is_file()]
    return [each for each in found if not any(part[0] in "._" for part in each.parts)]


def _use_of(path: Path) -> tuple[str, str]:
    """Return a Parquet file's use by its name or its folders', such as ``test``, and its data set's folder.

    ``a=1/en/train/0.parquet`` is for training, and of ``en``; ``en/train_sft-00000-of-00003.parquet`` is for
    training, and of ``en/train_sft``.
    """
    *folders, name = path.parts
    # The hub's branch for Parquet calls a folder so that has only the first rows.
    said = [each.removeprefix("split=").removeprefix("partial-") for each in folders]
    said = [each.lower() for each in (*said, re.split("[-_.]", name)[0])]
    for count in range(len(folders), -1, -1):
        if said[count] in {TRAIN, *_NAMES[EVAL]}:
            group = [each for each in folders[:count] if "=" not in each]
            if shard := re.match(r"(.+)[-_.]\d{5}-of-\d{5}", name if count == len(folders) else ""):
                group.append(shard[1])  # such as train_sft
            return said[count], "/".join(group) or "."
    return "", ""


def _require_all(path: Path, shards: Iterable[Path]) -> None:
    """Raise :class:`DatasetError` if there are fewer than their names say, such as ``-of-00003``."""
    totals = dict[str, set[str]]()
    for each in filter(None, (re.search(r"(\d{5,})-of-(\d{5,})", each.name) for each in shards)):
        totals.setdefault(each[2], set()).add(each[1])
    for total, found in totals.items():
        if len(found) < int(total):
            raise DatasetError(
                f"{path}: has {len(found)} of {int(total)} files with names that contain -of-{total}",
                hint="add the others, or rename these to train on them alone",
            )


def _data_files(path: Path) -> list[Path]:
    """Return the files in a folder whose names say a format."""
    files = sorted(each for each in path.iterdir() if each.is_file())
    return [each for each in files if _kind_of(each)[0] in READERS and each.name[0] != "."]


def unused_files(place: str) -> list[str]:
    """Return the names of a folder's data files that are for no use."""
    path, used = Path(place), set[Path]()
    if not path.is_dir() or _is_saved(path):
        return []
    for split in _NAMES:
        with suppress(DatasetError):
            used.update(_find_files(path, split))
    return [each.name for each in _data_files(path) if each not in used]


def require_files(place: str, split: str) -> None:
    """Raise :class:`DatasetError` for a folder without a file for this use, without reading one."""
    path = Path(place)
    if path.is_dir() and not _is_saved(path):
        _find_files(path, split)


def read_unseen(place: str, mapped: Path | None) -> Table | None:
    """Return a folder's or hub data set's split for evaluation, if it has one; ``None`` for a file."""
    try:
        return None if Path(place).is_file() else read_table(place, EVAL, mapped=mapped)
    except NoSplitError:
        return None


def _load_saved(path: Path) -> Any:
    try:
        from datasets import load_from_disk  # noqa: PLC0415 - only the nodes have it

        return load_from_disk(str(path))
    # The library raises many types.
    except Exception as error:
        raise DatasetError(f"{path}: can't be read by datasets: {first_line(error)}") from error


def load_hub(name: str, what: str, fix: str, *splits: str) -> Any:
    """Return a data set of the hub, or only these splits. Raises :class:`DatasetError` about ``what``."""
    try:
        from datasets import load_dataset  # noqa: PLC0415 - only the nodes have it

        found = load_dataset(name)
        return [found[each] for each in splits] if splits else found
    # The library raises many types, among them those of requests, the hub, and pyarrow, and KeyError.
    except Exception as error:
        raise DatasetError(
            f"{what} can't be loaded from the hub: {first_line(error)}",
            hint=hub_hint(error, name, fix, "datasets/"),
        ) from error


def _from_splits(name: str, found: Any, split: str) -> Table:
    """Return one split of ``datasets``' result."""
    if not hasattr(found, "features"):  # a dictionary of splits
        chosen = next((each for each in _NAMES[split] if each in found), None)
        if chosen is None:
            names = " or ".join(_NAMES[split])
            raise NoSplitError(f"{name}: has no split {names}, but {', '.join(found)}")
        found, name = found[chosen], f"{name} ({chosen})"
    elif split != TRAIN:
        raise NoSplitError(f"{name}: has one split, which is for training")
    features = {name: getattr(each, "feature", each) for name, each in found.features.items()}
    classes = {name: each.names for name, each in features.items() if hasattr(each, "int2str")}
    rows = Lazy[Row](found, lambda _, row: dict(row))
    return Table(name, tuple(found.column_names), rows, classes=classes)
