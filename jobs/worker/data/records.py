"""Reports of bad records in a data set. Standard library only, because the laptop also uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..runtime.errors import DatasetError

SKIP_HINT = "--skip-bad-records skips bad records"
ALL_BAD = "no record can be used: are the columns and the format as expected?"
MAGIC = {
    b"\x1f\x8b": "is compressed by gzip: unpack it first",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"PAR1": "is a Parquet file",
    b"\xff\xfe\0\0": "is UTF-32, not UTF-8",
    b"\xff\xfe": "is UTF-16, not UTF-8",
    b"\xfe\xff": "is UTF-16, not UTF-8",
}
"""What files are instead of text, by their first bytes."""
_SHOWN = 60
_TEXT_FILE, _MOST_LINES = re.compile(r"\.txt(\.gz)?: line \d+", re.IGNORECASE), 1000
_SURROGATE = re.compile("[\ud800-\udfff]")


def show(text: str) -> str:
    """Return a text in quotes, cut to a readable length."""
    return repr(text) if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]!r}…"


def require_text(text: object, what: str) -> str:
    """Return a text that can be tokenized. Raises :class:`DatasetError`, beginning with ``what``."""
    if not isinstance(text, str):
        raise DatasetError(f"{what} is not a text")
    if not text.strip():
        raise DatasetError(f"{what} is empty")
    # JSON can contain a lone surrogate ("\ud800"), which no tokenizer can read.
    if _SURROGATE.search(text):
        raise DatasetError(f"{what} contains half of a surrogate pair")
    return text


def require_single(text: object, place: str) -> None:
    """Raise :class:`DatasetError` for a text of a text file with so many lines that each may be a text."""
    if _TEXT_FILE.search(place) and str(text).count("\n") >= _MOST_LINES:
        raise DatasetError(
            f"{place}: has a text of more than {_MOST_LINES} lines",
            hint="separate texts by empty lines, or use JSON lines",
        )


@contextmanager
def noting(problems: list[DatasetError]) -> Iterator[None]:
    """Continue after a bad record, and record its error."""
    try:
        yield
    except DatasetError as error:
        problems.append(error)


def refusal(problems: Sequence[DatasetError], *, has_good: bool = True) -> DatasetError:
    """Return an error about the first bad record, with the number of others."""
    first, others = problems[0], len(problems) - 1
    more = f" (and {others} more bad record{'s' * (others > 1)})" if others else ""
    hint = first.hint or SKIP_HINT
    if not has_good:
        hint = hint.removesuffix(SKIP_HINT).removesuffix("; ") or ALL_BAD
    return DatasetError(first.message + more, hint=hint)


def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ``ValueError`` if it has a name twice: one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def why_not_utf8(error: UnicodeDecodeError) -> str:
    """Return what a file is instead, as far as its bytes tell."""
    for magic, meaning in MAGIC.items():
        if error.object.startswith(magic):
            return meaning
    byte = error.object[error.start : error.start + 1]
    other = byte.decode("cp1252", "ignore")
    more = f", which is {other!r} in Windows-1252" if other else ""
    return f"is not UTF-8 (a byte 0x{byte.hex()}{more})"


def skip_note(skipped: Sequence[DatasetError]) -> str:
    """Return a note with the number of skipped records and the first of them."""
    records = f"{len(skipped)} bad record{'s' * (len(skipped) > 1)}"
    return f"skipped {records}, the first: {skipped[0].message}"
