"""``run --array``: indexes, or the rows of a CSV file, as the elements of an array."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

from infra.errors import UsageError
from infra.files import read_text
from jobs.program.plan import NAME, RESERVED
from jobs.worker.array.plan import ArrayPlan

MOST_ELEMENTS = 10_000
_PART = r"[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9})?)?"
_INDEXES = rf"{_PART}(,{_PART})*"
_ARRAY = re.compile(
    rf"((?P<only>{_INDEXES})|(?P<file>.+?\.csv)(:(?P<rows>{_INDEXES}))?)(%(?P<limit>[1-9][0-9]{{0,5}}))?"
)


def read_array(text: str, folder: Path, program: tuple[str, ...]) -> ArrayPlan:
    """Return what ``--array`` asks for, such as ``1-100%8``, ``3,17``, or ``runs.csv:3,17``.

    Raises :class:`UsageError`.
    """
    match = _ARRAY.fullmatch(text)
    if not match:
        raise UsageError(
            f"--array {text}: expected indexes or a CSV file",
            hint="such as 1-100, 1-100%8 for at most 8 at a time, 3,17, runs.csv, or runs.csv:3,17",
        )
    asked = match["only"] or match["rows"]
    indexes = parse_indexes(asked) if asked else None
    if not match["file"]:
        elements: Mapping[int, Mapping[str, str]] = {index: {} for index in indexes or ()}
    else:
        rows = read_rows(folder / match["file"], match["file"])
        elements = rows if indexes is None else {i: rows[i] for i in indexes if i in rows}
        if missing := [index for index in indexes or () if index not in rows]:
            raise UsageError(f"--array {text}: there is no row {missing[0]}, only 1 to {len(rows)}")
    if not 0 < len(elements) <= MOST_ELEMENTS:
        raise UsageError(
            f"--array {text}: {'too many' if elements else 'no'} elements, expected 1 to {MOST_ELEMENTS:,}"
        )
    return ArrayPlan(program, elements, int(match["limit"] or 0), text, match["file"] or "")


def parse_indexes(text: str) -> list[int]:
    """Return the numbers of a list such as ``1-5,9`` or ``0-20:5``, in order; at most one too many."""
    found: set[int] = set()
    for part in text.split(","):
        first, last, step = (int(word or "1") for word in re.split("[-:]", f"{part}::")[:3])
        if "-" not in part:
            last = first
        if last < first or not step:
            raise UsageError(f"--array {text}: {part}: expected FIRST-LAST or FIRST-LAST:STEP")
        found.update(range(first, last + 1, step)[: MOST_ELEMENTS + 1])
    return sorted(found)


def read_rows(path: Path, name: str) -> dict[int, dict[str, str]]:
    """Return the rows of a CSV file as variables, by their numbers from 1. Raises :class:`UsageError`."""
    text = read_text(path)
    if "\0" in text:  # which variables can't have
        raise UsageError(f"--array {name}: it has a null character")
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(rows, [])
        _check_header(header, name)
        found: dict[int, dict[str, str]] = {}
        for row in filter(None, rows):
            if len(row) != len(header):
                raise UsageError(
                    f"--array {name}: line {rows.line_num} has {len(row)} values for {len(header)} columns"
                )
            found[len(found) + 1] = dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UsageError(f"--array {name}: line {rows.line_num}: {error}") from None
    return found


def _check_header(header: list[str], name: str) -> None:
    """Require the columns' names to be those of variables."""
    for column in header:
        if not NAME.fullmatch(column):
            raise UsageError(
                f"--array {name}: column {column!r} is not the name of a variable",
                hint="the first line names the variables that each row sets, such as lr,seed",
            )
        if RESERVED.fullmatch(column):
            raise UsageError(
                f"--array {name}: column {column}: the placement sets it for each rank"
            )
        if header.count(column) > 1:
            raise UsageError(f"--array {name}: there are two columns {column}")
    if not header:
        raise UsageError(f"--array {name}: it is empty")
