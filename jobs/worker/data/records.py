"""Reports of bad records in a data set. Standard library only, because the laptop also uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..runtime.errors import DatasetError

SKIP_HINT = "--skip-bad-records skips bad records"
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


def refusal(problems: Sequence[DatasetError]) -> DatasetError:
    """Return an error about the first bad record, with the number of others."""
    first, others = problems[0], len(problems) - 1
    more = f" (and {others} more bad record{'s' * (others > 1)})" if others else ""
    return DatasetError(first.message + more, hint=first.hint or SKIP_HINT)


def skip_note(skipped: Sequence[DatasetError]) -> str:
    """Return a note with the number of skipped records and the first of them."""
    records = f"{len(skipped)} bad record{'s' * (len(skipped) > 1)}"
    return f"skipped {records}, the first: {skipped[0].message}"
