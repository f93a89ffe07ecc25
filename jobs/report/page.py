"""The report: what its page shows, as data, and the page as HTML (page.html).

It has no scripts and needs no network; it is light and dark, and printable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cluster.console.display import format_seconds
from infra.errors import UsageError
from jobs.report.charts import BarChart, Chart, render_svg
from jobs.report.figures import PUBLISHED, HourlyPrice, format_costs, published_costs
from jobs.report.receipt import Receipt
from jobs.worker.runtime.output import new_file

PAGE = "report.html"
EPOCH, RUN = "one epoch of training", "the whole run"
_WIDTHS = {"loss": "main", "lr": "side", "time": "wide", "ranks": "wide", "trial-options": "wide"}


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


def write_page(report: Report, page: Path) -> None:
    """Write the page atomically. Raises :class:`UsageError` if it can't be written."""
    if page.is_dir():
        raise UsageError(f"--output {page}: is a folder", hint=f"--output {page}/{PAGE}")
    try:
        with new_file(page) as partial:
            # File names may contain bytes that are not valid text.
            partial.write_text(render_page(report), encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--output {page}: can't be written: {error.strerror}") from None


def render_page(report: Report) -> str:
    """Return the page as text."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("page.html").render(
        report=report,
        costs=Table(("", "time", "cost"), _costs(report)),
        receipt=Table(("", "time", "cost"), report.receipt.rows() if report.receipt else []),
        widths=_WIDTHS,
        is_bars=lambda chart: isinstance(chart, BarChart),
        legend=_legend,
        svg=render_svg,
    )


def _legend(chart: Chart) -> Sequence[tuple[str, str]]:
    """Return the style and label of each entry; a single line needs none."""
    if isinstance(chart, BarChart):
        sums = [sum(bar.values[i] for bar in chart.bars) for i in range(len(chart.parts))]
        return [
            (f"swatch c{color}", _with_value(part, total, chart))
            for part, color, total in zip(chart.parts, chart.colors, sums, strict=True)
            if total > 0
        ]
    lines = {f"{line.style} c{line.color}": line.label for line in chart.lines}
    entries = [(f"swatch {style}", label) for style, label in lines.items()]
    entries += [("swatch shade c0", "lowest to highest")] * bool(chart.band)
    return entries if len(entries) > 1 else []


def _with_value(part: str, total: float, chart: BarChart) -> str:
    """Add the value to the legend if there is only one bar; otherwise the table has it."""
    if len(chart.bars) > 1:
        return part
    share = total / (sum(chart.bars[0].values) or 1.0)
    return f"{part}: {format_seconds(total)}, {share:.1%}"


def _costs(report: Report) -> list[tuple[str, str, str]]:
    if not report.price:
        return []
    rows = [(name, seconds, report.price.usd(seconds)) for name, seconds in report.times.items()]
    for machines, seconds, usd in published_costs() if rows and report.like_published else ():
        rows.append((f"published, {PUBLISHED}: one epoch on {machines}", seconds, usd))
    return format_costs(rows)
