"""What the report's page shows, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jobs.report.charts import Chart
from jobs.report.figures import HourlyPrice
from jobs.report.receipt import Receipt

EPOCH, RUN = "one epoch of training", "the whole run"


@dataclass(frozen=True)
class Table:
    """A header and rows of cells; ``numeric`` cells are right-aligned."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: bool = True


@dataclass(frozen=True)
class Section:
    """A section of the page. Without a chart, ``missing`` says why."""

    name: str
    title: str
    chart: Chart | None
    table: Table | None = None
    missing: str = ""
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Tile:
    """A key figure at the top of the page."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    warnings: Sequence[str]
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]]
    placement: Table | None
    confusion: Table | None
    """The confusion matrix."""
    price: HourlyPrice | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    """The known seconds of EPOCH and RUN."""
    like_published: bool = False
    """Whether the run is comparable with the published ones."""
    receipt: Receipt | None = None

    def usd(self, name: str) -> float | None:
        """Return the cost of EPOCH or RUN, if it is known, without the nodes' startup and idle time."""
        return self.price.usd(self.times[name]) if self.price and name in self.times else None
