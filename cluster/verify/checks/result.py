"""The result of one check, and helpers that all checks share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)
CLUSTER = "cluster"
"""Stands for a node's name in results that concern the whole cluster."""
_MAX_NAMED = 4


class Verdict(str, Enum):
    """Outcome of a check. ``SKIPPED``: not checked, or the machine does not expose the value."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckResult:
    """One check of one node. ``remedy`` says how to fix a warning or failure: text or commands, by line."""

    node: str
    check: str
    verdict: Verdict
    found: str
    wanted: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        return {**asdict(self), "verdict": self.verdict.value}


def worst(results: Iterable[CheckResult]) -> Verdict:
    """Return the worst verdict; skipped checks do not count."""
    found = {result.verdict for result in results}
    return next(v for v in (Verdict.FAIL, Verdict.WARN, Verdict.OK) if v in found)


def typical(values: Iterable[T]) -> T:
    """Return the most frequent value; on a tie, the first one, which is the head's."""
    return Counter(values).most_common(1)[0][0]


def name_some(names: Sequence[str]) -> str:
    """Join the names; of many, only the first few."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def sort_results(results: Sequence[CheckResult], nodes: Iterable[str]) -> tuple[CheckResult, ...]:
    """Group the results by check, in node order within each check."""
    order = {node: rank for rank, node in enumerate(nodes)}
    checks = {check: rank for rank, check in enumerate(dict.fromkeys(r.check for r in results))}
    return tuple(sorted(results, key=lambda r: (checks[r.check], order.get(r.node, -1))))
