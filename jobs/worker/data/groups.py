"""Groups of texts: a query, the text to find for it, and others, in columns or in lists as FlagEmbedding's.

The laptop reads them with the same code, without numpy.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..runtime.errors import DatasetError
from .mapped import Lazy
from .records import require_text
from .table import Table, choose_column

if TYPE_CHECKING:
    from .tokens import Ints, Longs, TextSample, TextSamples

QUERY_COLUMNS = ("anchor", "query", "question", "sentence1", "sentence", "text")
POSITIVE_COLUMNS = (
    *("positive", "passage", "context", "answer", "sentence2", "pair", "document"),
    *("pos", "positives"),
)
_NEGATIVE = re.compile(r"(hard_)?negatives?(_\d+)?|neg")


class Group(NamedTuple):
    """A query, its positive, and its negatives."""

    texts: tuple[str, ...]


def choose_group_columns(table: Table, options: Any, known: Sequence[str]) -> list[str]:
    """Return the columns of queries, positives, and any negatives. Raises :class:`DatasetError`."""
    query = choose_column(table, options.text_column, known, "--text-column")
    positive = choose_column(table, options.pair_column, POSITIVE_COLUMNS, "--pair-column")
    negatives = [name for name in table.columns if _NEGATIVE.fullmatch(name.strip())]
    if options.negative_column is not None:
        negatives = [choose_column(table, options.negative_column, (), "--negative-column")]
    return [query, positive, *negatives]


def read_groups(place: str, row: Mapping[str, Any], *columns: str) -> tuple[Group, ...]:
    """Return a group for each positive of a row. Raises :class:`DatasetError`."""
    query = require_text(row.get(columns[0]), f"{place}: column {columns[0]!r}").strip()
    positives = _texts(place, row, columns[1])
    present = (column for column in columns[2:] if row.get(column) is not None)
    negatives = [_texts(place, row, column) for column in present]
    if not positives:
        raise DatasetError(f"{place}: column {columns[1]!r} has no text")
    return tuple(Group((query, each, *chain.from_iterable(negatives))) for each in positives)


def _texts(place: str, row: Mapping[str, Any], column: str) -> list[str]:
    value, what = row.get(column), f"{place}: column {column!r}"
    if not isinstance(value, list):
        return [require_text(value, what).strip()]
    return [require_text(x, f"{what}: text {n}").strip() for n, x in enumerate(value, start=1)]


def flatten(rows: Sequence[tuple[Group, ...]]) -> Sequence[Group]:
    """Return the groups of all rows. Those of rows on the disk stay there, if each row has one."""
    if isinstance(rows, Lazy) and all(len(each) == 1 for each in rows):
        return Lazy(rows, lambda _, row: row[0])
    return [*chain.from_iterable(rows)]


class FlatTexts(Sequence[str]):
    """Some texts of each record, one after the other, read from the records at each pass."""

    def __init__(self, records: Sequence[Any], pick: Callable[[Any], Sequence[str]]) -> None:
        self._records, self._pick = records, pick
        self.bounds = array("q", [0])
        for each in records:
            self.bounds.append(self.bounds[-1] + len(pick(each)))

    @property
    def owners(self) -> Sequence[int]:
        """The number of each text's record."""
        import numpy as np  # noqa: PLC0415

        found: Any = np.repeat(np.arange(len(self._records)), np.diff(self.bounds))
        return found  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self.bounds[-1]

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(map(self._pick, self._records))

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]


class GroupSample(NamedTuple):
    """A group as tokens; ``numbers`` are those of its texts without prompts."""

    parts: Sequence[TextSample]
    numbers: Longs


@dataclass(frozen=True)
class Grouped:
    """Groups as tokens: group ``n`` has the texts (or pairs) ``numbers[bounds[n] : bounds[n + 1]]``.

    Text ``number`` is ``parts[first[number]]``; equal texts may have one number, and have one in ``same`` if
    only their prompts differ. ``parts`` are all texts of the data, one group after the other, whose
    ``targets`` are their groups.
    """

    parts: TextSamples
    bounds: Longs
    numbers: Longs
    first: Longs
    same: Longs

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> GroupSample:
        numbers = self.texts_of(index)
        parts = [self.parts[int(each)] for each in self.first[numbers]]
        return GroupSample(parts, self.same[numbers])

    def texts_of(self, index: int) -> Longs:
        """Return the numbers of a group's texts."""
        return self.numbers[self.bounds[index] : self.bounds[index + 1]]

    @cached_property
    def lengths(self) -> Ints:
        """Every group's number of tokens."""
        import numpy as np  # noqa: PLC0415

        of_text = self.parts.lengths[self.first[self.numbers]]
        found: Ints = np.add.reduceat(of_text, self.bounds[:-1])
        return found

    def token_ids(self) -> Longs:
        """Return the IDs that occur in any text, ascending."""
        return self.parts.token_ids()

    def digest(self) -> str:
        """Return a digest of the data's groups."""
        return self.parts.digest()
