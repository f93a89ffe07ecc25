"""Counts that often explain a bad score or one that is too good, before anything is trained. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any
from unicodedata import normalize

from .records import show

FEW_ROWS = 10
"""A class with fewer rows is hardly learned."""
_SHOWN = 3


def describe(train: Sequence[Any], unseen: Sequence[Any] | None) -> str:
    """Return what is unusual about records, in one sentence; "" if nothing is.

    ``unseen`` are those for evaluation, or None if they are the same. A sentence counts once for each of
    its tags.
    """
    counts = Counter(chain.from_iterable({*getattr(each, "labels", ())} for each in train))
    found = [*_shared(train, unseen or ()), *_rare(counts), *_alike(counts)]
    return "; ".join(found)


def _content(record: Any) -> int:
    """Return a hash of a record's texts, without its labels and its place; white space does not count."""
    names = ("texts", "words", "text", "context", "prompt", "completion")
    parts = [getattr(record, name) for name in names if hasattr(record, name)] or [record]
    return hash(tuple(_words(parts)))


def _words(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield from part.split()
    elif isinstance(part, (list, tuple, Iterator)):
        for each in part:
            yield from _words(each)
    else:
        yield str(part)


def _shared(train: Sequence[Any], unseen: Sequence[Any]) -> Iterator[str]:
    known = set(map(_content, train)) if unseen else set()
    count = sum(_content(record) in known for record in unseen)
    if count:
        yield (
            f"{count:,} of {len(unseen):,} records for evaluation are also in the training data, so the "
            "scores are too good"
        )


def _rare(counts: Counter[str]) -> Iterator[str]:
    rare = sorted(
        (name for name in counts if counts[name] < FEW_ROWS), key=lambda n: (counts[n], n)
    )
    if rare:
        shown = ", ".join(f"{show(name)} {counts[name]}" for name in rare[:_SHOWN])
        more = ", …" if len(rare) > _SHOWN else ""
        yield f"{len(rare)} of {len(counts)} labels have fewer than {FEW_ROWS} rows ({shown}{more})"


def _alike(counts: Counter[str]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in sorted(counts):
        # An accent may be a character of its own, as in file names on a Mac.
        plain = " ".join(normalize("NFC", name).split()).casefold()
        groups.setdefault(plain, []).append(name)
    alike = [names for names in groups.values() if len(names) > 1]
    if alike:
        shown = ", ".join(" and ".join(map(show, names)) for names in alike[:_SHOWN])
        more = ", …" if len(alike) > _SHOWN else ""
        yield f"labels differ only in case, spaces, or Unicode form ({shown}{more})"
