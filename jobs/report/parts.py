"""What the page is made of, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jobs.report.charts import Chart
from jobs.report.figures import Cost


@dataclass(frozen=True)
class Table:
    """A header and rows of cells; numbers stand right where ``numeric``."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: bool = True


@dataclass(frozen=True)
class Section:
    """One part of the page. ``chart`` is ``None`` where there is nothing to draw: ``missing`` says why."""

    name: str
    title: str
    chart: Chart | None
    table: Table | None = None
    missing: str = ""
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Tile:
    """One figure of the page's head."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class Report:
    """All that the page says."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    warnings: Sequence[str]
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]]
    placement: Table | None
    cost: Cost | None = None
