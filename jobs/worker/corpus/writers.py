"""Writes rows with their predictions: a shard's, and those of all shards as one file."""

from __future__ import annotations

import csv
import json
import math
import shutil
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..runtime.errors import TrainingError, first_line
from ..runtime.output import replacing

Values = Mapping[str, Any]


def _to_json(value: Any) -> str:
    """Return JSON with null for NaN and infinity, Base64 for bytes, and texts for times and decimals."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_json)
    except ValueError:
        return json.dumps(finite(value), ensure_ascii=False, default=_as_json)


def _as_json(value: Any) -> str:
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


def finite(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity: they become None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(finite, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def part_suffix(output: str) -> str:
    """Return the format of the shards of an output: JSON lines for CSV, which has no types."""
    return ".jsonl" if output.lower().endswith((".csv", ".jsonl")) else ".parquet"


def write_part(
    target: Path,
    output: str,
    rows: Sequence[Values],
    known: Any = (),
    vector: str | None = None,
    first: Sequence[Values] = (),
) -> None:
    """Write a shard's rows for this output.

    ``known`` has the fields of a Parquet file that they are from; ``vector`` is the column whose lists of
    numbers have one length. In a folder, a column's type also holds the values in the input file's ``first``
    rows. Raises :class:`TrainingError` for values that Parquet lacks.
    """
    if part_suffix(output) == ".parquet":
        # merge_parts gives empty columns their types.
        is_merged = output.lower().endswith(".parquet")
        fields = {each.name: each for each in known}
        _write_parquet(target, rows, fields, vector, None if is_merged else first)
        return
    # JSON writes half of a surrogate pair, which UTF-8 lacks, with the same escape.
    with target.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{_to_json(row)}\n" for row in rows)


def _typed(name: str, values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        text = f"column {name!r}: not all values are {kind}: {first_line(error)}"
        raise TrainingError(text, hint="JSON lines (.jsonl) can hold any values") from error


def _write_parquet(
    target: Path,
    rows: Sequence[Values],
    known: Mapping[str, Any],
    vector: str | None,
    first: Sequence[Values] | None,
) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    def to_array(name: str) -> Any:
        values: list[Any] = [row.get(name) for row in rows]
        if name in known:
            return _typed(name, values, known[name].type)
        if name == vector:
            return pa.array(values, pa.list_(pa.float32(), len(values[0])))
        samples = [row[name] for row in first or () if name in row]
        # Readers of a folder take a column's type from one file; merge_parts finds one for all.
        is_text = first is not None and all(each is None for each in samples or values)
        return _to_array([*samples, *values], is_text=is_text)[len(samples) :]

    names = dict.fromkeys(name for row in (*(first or ()), *rows) for name in row)
    arrays = {name: to_array(name) for name in names}
    fields = [known.get(name) or pa.field(name, each.type) for name, each in arrays.items()]
    write_table(pa.Table.from_arrays([*arrays.values()], schema=pa.schema(fields)), target)


def _to_array(values: Sequence[Any], *, is_text: bool) -> Any:
    """Return an array of the values, as texts if they are of several types or not for Parquet."""
    import pyarrow as pa

    with suppress(pa.ArrowException, ValueError, TypeError, OverflowError):
        found = pa.array(values)
        # Parquet has no structs without fields.
        if not is_text and "struct<>" not in str(found.type):
            return found
    return pa.array([*map(_as_text, values)], pa.string())


def merge_parts(parts: Sequence[Path], output: Path) -> None:
    """Write the rows of all shards, in order, as one file. Raises :class:`TrainingError`."""
    with replacing(output) as target:
        _MERGES[output.suffix.lower()](parts, target)


def _merge_lines(parts: Sequence[Path], target: Path) -> None:
    with target.open("wb") as file:
        for part in parts:
            with part.open("rb") as rows:
                shutil.copyfileobj(rows, file)


def _read_lines(parts: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for part in parts:
        with part.open(encoding="utf-8", newline="\n") as file:
            yield from map(json.loads, file)


def _merge_csv(parts: Sequence[Path], target: Path) -> None:
    names = list(dict.fromkeys(name for row in _read_lines(parts) for name in row))
    with target.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        # It quotes the line breaks in cells that are those between rows.
        lines = SimpleNamespace(write=lambda line: file.write(f"{line[:-2]}\n"))
        writer = csv.writer(lines, lineterminator="\r\n")
        writer.writerow(names)
        for row in _read_lines(parts):
            writer.writerow(
                _to_json(value) if isinstance(value, dict | list | bool) else value
                for value in map(row.get, names)
            )


def _merge_parquet(parts: Sequence[Path], target: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter, read_schema, read_table

    schemas = [*map(read_schema, parts)]
    names = dict.fromkeys(name for each in schemas for name in each.names)
    schema = pa.schema([_widest([s.field(n) for s in schemas if n in s.names]) for n in names])
    with ParquetWriter(target, schema) as writer:
        for part in parts:
            table = read_table(part)
            if table.schema != schema:
                arrays = [_convert(table, each) for each in schema]
                table = pa.Table.from_arrays(arrays, schema=schema)
            writer.write_table(table)


def _convert(table: Any, field: Any) -> Any:
    """Return a column of the table with this field's type, without values if it has none."""
    import pyarrow as pa

    if field.name not in table.column_names:
        return pa.nulls(len(table), field.type)
    values = table[field.name].to_pylist()
    if pa.types.is_string(field.type):
        values = [*map(_as_text, values)]
    return _typed(field.name, values, field.type)


def _widest(fields: Sequence[Any]) -> Any:
    """Return a field that can hold the values of all: text if no other can."""
    import pyarrow as pa

    try:
        schemas = [pa.schema([each]) for each in fields]
        (found,) = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return pa.field(fields[0].name, pa.string())
    return found.with_type(pa.string()) if pa.types.is_null(found.type) else found


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else _to_json(value).strip('"')
    # As in JSON lines, half of a surrogate pair.
    return (
        None
        if text == "null" and value != text
        else text.encode(errors="backslashreplace").decode()
    )


_MERGES = {".csv": _merge_csv, ".jsonl": _merge_lines, ".parquet": _merge_parquet}
