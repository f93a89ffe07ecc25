"""The report as one HTML page without scripts or network access, light and dark, printable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from infra.errors import UsageError
from jobs.report.charts import BarChart, LineChart, render_svg
from jobs.report.figures import format_duration, format_usd, published_costs
from jobs.report.sections import Report, Section, Table, Tile

PAGE = "report.html"
_STYLE = Path(__file__).with_name("style.css")
_WIDTHS = {"loss": "main", "lr": "side", "time": "wide", "ranks": "wide"}
_WIDE_FACT = 100
"""A longer fact, such as the command, gets a full row."""
# No network requests, even if a file in the folder is hostile.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_page(report: Report, page: Path) -> None:
    """Write the page atomically. Raises :class:`UsageError` if it can't be written."""
    if page.is_dir():
        raise UsageError(f"--output {page}: is a folder", hint=f"--output {page}/{PAGE}")
    partial = page.with_name(f".{page.name}.partial")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        # File names may contain bytes that are not valid text.
        partial.write_text(render_page(report), encoding="utf-8", errors="replace")
        partial.replace(page)
    except OSError as error:
        raise UsageError(f"--output {page}: can't be written: {error.strerror}") from None


def render_page(report: Report) -> str:
    """Return the page as text."""
    title = escape(report.title)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{title} – spr-cluster report</title>",
            f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>",
            "</head>",
            "<body>",
            "<main>",
            *_head(report),
            '<div class="sections">',
            *(line for section in report.sections for line in _section(section)),
            *_about(report),
            "</div>",
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _head(report: Report) -> Iterator[str]:
    yield "<header>"
    yield f"<h1>{escape(report.title)}</h1>"
    yield f'<p class="quiet">{escape(report.subtitle)}</p>'
    yield "</header>"
    for warning in report.warnings:
        yield f'<p class="warning">{escape(warning)}</p>'
    if report.tiles:
        yield '<dl class="tiles">'
        yield from map(_tile, report.tiles)
        yield "</dl>"


def _tile(tile: Tile) -> str:
    remark = f'<dd class="quiet">{escape(tile.remark)}</dd>' if tile.remark else ""
    return f"<div><dt>{escape(tile.label)}</dt><dd>{escape(tile.value)}</dd>{remark}</div>"


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.name}" class="card {_WIDTHS.get(section.name, "")}">'
    yield f"<h2>{escape(section.title)}</h2>"
    chart = section.chart
    if chart is None:
        yield f'<p class="missing">{escape(section.missing)}</p>'
        yield "</section>"
        return
    if chart.note:
        yield f'<p class="quiet">{escape(chart.note)}</p>'
    yield "<figure>"
    yield f'<div class="frame {"of-bars" if isinstance(chart, BarChart) else "of-lines"}">'
    yield render_svg(chart)
    yield "</div>"
    yield from _legend(chart)
    yield "</figure>"
    for remark in section.remarks:
        yield f'<p class="quiet">{escape(remark)}</p>'
    if section.table and section.table.rows:
        yield "<details><summary>Show as table</summary>"
        yield from _table(section.table)
        yield "</details>"
    yield "</section>"


def _legend(chart: LineChart | BarChart) -> Iterator[str]:
    entries: Sequence[tuple[str, str]]
    if isinstance(chart, BarChart):
        sums = [sum(bar.values[i] for bar in chart.bars) for i in range(len(chart.parts))]
        entries = [
            (f"swatch c{color}", _with_value(part, total, chart))
            for part, color, total in zip(chart.parts, chart.colors, sums, strict=True)
            if total > 0
        ]
    else:
        lines = {f"{line.style} c{line.color}": line.label for line in chart.lines}
        bands = {f"shade c{band.color}": band.label for band in chart.bands}
        entries = [(f"swatch {style}", label) for style, label in {**lines, **bands}.items()]
    if len(entries) > 1 or isinstance(chart, BarChart):
        yield '<ul class="legend">'
        for style, label in entries:
            yield f'<li><span class="{style}"></span>{escape(label)}</li>'
        yield "</ul>"


def _with_value(part: str, total: float, chart: BarChart) -> str:
    """Add the value to the legend if there is only one bar; otherwise the table has it."""
    if len(chart.bars) > 1:
        return part
    share = total / (sum(chart.bars[0].values) or 1.0)
    return f"{part}: {chart.format(total)}, {share:.1%}"


def _table(table: Table) -> Iterator[str]:
    kind = ' class="numbers"' if table.numeric else ""
    yield f'<div class="scroll"><table{kind}>'
    yield f"<thead><tr>{_cells('th', table.header)}</tr></thead>"
    yield "<tbody>"
    for row in table.rows:
        yield f"<tr>{_cells('td', row)}</tr>"
    yield "</tbody></table></div>"


def _cells(tag: str, row: Sequence[str]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return "".join(f"<{tag}{scope}>{escape(cell)}</{tag}>" for cell in row)


def _about(report: Report) -> Iterator[str]:
    if report.confusion:
        yield '<section class="card wide" id="confusion"><h2>Confusion matrix</h2>'
        yield '<p class="quiet">Rows are the true classes, columns the predicted ones.</p>'
        yield from _table(report.confusion)
        yield "</section>"
    yield '<section class="card" id="cost"><h2>Cost</h2>'
    yield from _cost(report)
    yield "</section>"
    yield '<section class="card wide" id="environment"><h2>Environment</h2>'
    if report.facts:
        yield '<dl class="facts">'
        for name, value in report.facts:
            wide = ' class="wide"' if len(value) > _WIDE_FACT else ""
            yield f"<div{wide}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        yield "</dl>"
    else:
        yield '<p class="missing">No data in the results.</p>'
    yield "</section>"
    yield '<section class="card wide" id="placement"><h2>Placement</h2>'
    if report.placement:
        yield '<p class="quiet">What each rank found on its node, compared with the plan.</p>'
        yield from _table(report.placement)
    else:
        yield '<p class="missing">No data: the results contain no ranks.</p>'
    yield "</section>"


def _cost(report: Report) -> Iterator[str]:
    cost = report.cost
    if cost is None:
        yield (
            '<p class="missing">No data: the price is unknown. '
            "Set it with <code>--instance-type</code> or <code>--price</code>.</p>"
        )
        return
    rows = []
    if cost.epoch is not None and cost.epoch_seconds is not None:
        rows.append(
            ("one epoch of training", format_duration(cost.epoch_seconds), format_usd(cost.epoch))
        )
    if cost.run is not None:
        total = cost.run * 3600 / cost.price.usd_per_hour if cost.price.usd_per_hour else 0.0
        rows.append(("the whole run", format_duration(total), format_usd(cost.run)))
    if not rows:
        yield '<p class="missing">No data: the duration is unknown.</p>'
        return
    rows += [
        (f"published: one epoch on {machines}", format_duration(seconds), format_usd(usd))
        for machines, seconds, usd in published_costs()
    ]
    price = f"${cost.price.usd_per_hour:,.2f} per hour: {cost.price.source}."
    excluded = "Excludes the nodes' startup and idle time, disks, and traffic."
    yield f'<p class="quiet">{escape(price)} {excluded}</p>'
    yield from _table(Table(("", "time", "cost"), rows))
