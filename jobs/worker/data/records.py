"""Reports of bad records in a data set. Standard library only, because the laptop also uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..runtime.errors import DatasetError

SKIP_HINT = "--skip-bad-records skips bad records"
_ALL_BAD = "no record can be used: are the columns and the format as expected?"
_SHOWN = 60
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
    return DatasetError(
        first.message + more, hint=hint if has_good else hint.replace(SKIP_HINT, _ALL_BAD)
    )


def why_not_utf8(error: UnicodeDecodeError) -> str:
    """Return what a file is instead, as far as its bytes tell."""
    if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is UTF-16, not UTF-8"
    byte = error.object[error.start : error.start + 1]
    other = byte.decode("cp1252", "ignore")
    more = f", which is {other!r} in Windows-1252" if other else ""
    return f"is not UTF-8 (a byte 0x{byte.hex()}{more})"


def skip_note(skipped: Sequence[DatasetError]) -> str:
    """Return a note with the number of skipped records and the first of them."""
    records = f"{len(skipped)} bad record{'s' * (len(skipped) > 1)}"
    return f"skipped {records}, the first: {skipped[0].message}"
