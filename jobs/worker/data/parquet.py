"""Parquet files: their rows, and the columns that folders' names and ``datasets`` add to them.

It needs pyarrow, which the laptop may not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import parquet, types

from ..runtime.errors import DatasetError, first_line
from .mapped import TOGETHER
from .table import Row

_BATCH = 1024
"""Rows that are read together."""


@contextmanager
def explaining_parquet(path: Path) -> Iterator[None]:
    """Raise :class:`DatasetError` for a file that can't be read."""
    try:
        yield
    except DatasetError:
        raise
    # Times may be no times of Python.
    except (pa.ArrowException, OSError, OverflowError, ValueError) as error:
        text, hint = f"can't be read as Parquet: {first_line(error)}", None
        if "timezone" in text or "zoneinfo" in text:
            text = "has times in a zone of which this machine has no data"
            hint = (
                "install tzdata, on newer systems also tzdata-legacy; or write times without zones"
            )
        raise DatasetError(f"{path}: {text}", hint=hint) from error


def stream_parquet(path: Path, first: int) -> Iterator[tuple[str, Row]]:
    """Yield a file's rows from the ``first`` on with their places. Raises :class:`DatasetError`."""
    with explaining_parquet(path), parquet.ParquetFile(path) as file:
        require_names(path, file.schema_arrow)
        counts = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
        groups = [n for n, end in enumerate(accumulate(counts)) if end > first]
        at = sum(counts[: groups[0]]) if groups else 0
        for batch in file.iter_batches(_BATCH, groups) if groups else ():
            start = min(max(at, first), at + len(batch))
            for number, row in enumerate(batch.slice(start - at).to_pylist(), start + 1):
                yield f"{path}: row {number}", row
            at += len(batch)


def require_names(path: Path, schema: Any) -> None:
    """Raise :class:`DatasetError` for a file with two columns of the same name."""
    if len({*schema.names}) < len(schema.names):
        raise DatasetError(f"{path}: has two columns of the same name")


class Partition(NamedTuple):
    """A Parquet file, and the columns that its folders name, such as ``label=good``, which Spark writes."""

    path: Path
    folders: Mapping[str, str | None]


def find_partitions(place: Path, paths: Sequence[Path]) -> list[Partition]:
    """Return a place's files. All have the columns that the place's folders name for any."""
    found = [
        dict(each.split("=", 1) for each in path.relative_to(place).parts[:-1] if "=" in each)
        for path in paths
    ]
    names = dict.fromkeys(chain.from_iterable(found))
    return [
        Partition(path, {name: _folder_value(each.get(name)) for name in names})
        for path, each in zip(paths, found, strict=True)
    ]


def _folder_value(text: str | None) -> str | None:
    return None if text in (None, "__HIVE_DEFAULT_PARTITION__") else unquote(text)


def read_schema(file: Partition) -> Any:
    """Return a file's schema. Raises :class:`DatasetError`."""
    with explaining_parquet(file.path):
        return _with_folders(file, parquet.read_schema(file.path).empty_table()).schema


def read_tables(partition: Partition, schema: Any, count: int = _BATCH) -> Iterator[Any]:
    """Yield a Parquet file's rows as tables of this schema."""
    with explaining_parquet(partition.path), parquet.ParquetFile(partition.path) as file:
        for batch in file.iter_batches(count):
            table = _with_folders(partition, pa.Table.from_batches([batch])).select(schema.names)
            yield table if table.schema == schema else table.cast(schema)


def plain_schema(schema: Any) -> Any:
    """Return a schema without dictionaries, which differ between files, and with times as texts."""
    for number, each in enumerate(schema):
        if types.is_dictionary(each.type):
            schema = schema.set(number, each.with_type(each.type.value_type))
        elif types.is_temporal(each.type):
            schema = schema.set(number, each.with_type(pa.string()))
    return schema


def _with_folders(file: Partition, table: Any) -> Any:
    for name, value in file.folders.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.array([value] * len(table), pa.string()))
    return table


def class_names(schema: Any) -> dict[str, Sequence[str]]:
    """Return the class names that ``datasets`` has written into a Parquet file, by their columns."""
    found = json.loads((schema.metadata or {}).get(b"huggingface", "{}"))
    features = (found.get("info") or {}).get("features") or {}
    inner = {name: each.get("feature", each) for name, each in features.items() if "_type" in each}
    return {
        name: each["names"]
        for name, each in inner.items()
        # Other tools keep the text when they remove the column.
        if name in schema.names and isinstance(each, dict) and each.get("_type") == "ClassLabel"
    }


def write_arrow(
    place: Path, files: Sequence[Partition], schemas: Sequence[Any], target: Path
) -> None:
    """Write the rows of a place's files as one Arrow file. Raises :class:`DatasetError`."""
    with explaining_parquet(place):
        schema = pa.unify_schemas([*map(plain_schema, schemas)], promote_options="permissive")
    with pa.OSFile(str(target), "wb") as out, pa.ipc.new_file(out, schema) as writer:
        for file in files:
            for table in read_tables(file, schema, TOGETHER):
                writer.write_table(table)
