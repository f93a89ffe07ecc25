"""Charts as inline SVG that scales with the page while its text keeps its size. Pure.

Positions are percentages. Lines use an inner coordinate system that is stretched to fit; labels of
the axes lie in the frame's padding. Colors and fonts come from the page's style sheet, by class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from jobs.report.charts import Axis, Band, BarChart, Chart, ChartPoint, Line, LineChart, axes

_WIDE, _HIGH = 2000, 1000
_HEIGHT = 240
_ROW, _BAR = 46, 18


def render_svg(chart: Chart) -> str:
    """Return one ``<svg>`` with a title and a description for screen readers."""
    if isinstance(chart, BarChart):
        return _frame(chart, "bars", _ROW * len(chart.bars), "".join(_bars(chart)))
    return _frame(chart, "plot", _HEIGHT, "".join(_lines(chart)))


def _frame(chart: Chart, kind: str, height: int, content: str) -> str:
    name = escape(chart.name)
    return (
        f'<svg class="{kind}" id="chart-{name}" role="img" width="100%" height="{height}" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(chart.title)}</title>'
        f'<desc id="{name}-desc">{escape(chart.note)}</desc>{content}</svg>'
    )


def _lines(chart: LineChart) -> Iterator[str]:
    x, y = axes(chart)
    yield from _grid(x, y)
    yield (
        f'<svg class="data" width="100%" height="100%" viewBox="0 0 {_WIDE} {_HIGH}" '
        'preserveAspectRatio="none">'
    )
    for band in chart.bands:
        yield _area(band, x, y)
    for line in chart.lines:
        if line.style != "dots":
            yield f'<path class="{line.style} c{line.color}" d="{_path(line.points, x, y)}"/>'
    yield "</svg>"
    for line in chart.lines:
        if line.style == "dots" or len(line.points) == 1:
            yield from _dots(line, x, y)
    yield f'<text class="unit" x="0" y="-10">{escape(chart.y_title)}</text>'
    yield f'<text class="unit end" x="100%" y="{_HEIGHT + 38}">{escape(chart.x_title)}</text>'


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value, text in y.ticks:
        place = _percent(1 - y.at(value))
        yield f'<line class="grid" x1="0" x2="100%" y1="{place}" y2="{place}"/>'
        yield f'<text class="end" x="-8" y="{place}" dy="4">{text}</text>'
    for value, text in x.ticks:
        place = _percent(x.at(value))
        yield f'<line class="tick" x1="{place}" x2="{place}" y1="100%" y2="{_HEIGHT + 5}"/>'
        yield f'<text class="middle" x="{place}" y="{_HEIGHT + 20}">{text}</text>'
    base = _percent(1 - y.at(0.0))
    yield f'<line class="axis" x1="0" x2="100%" y1="{base}" y2="{base}"/>'


def _path(points: Sequence[ChartPoint], x: Axis, y: Axis) -> str:
    """Return a path of straight lines, interrupted by gaps."""
    words, draws = [], False
    for point in points:
        if not math.isfinite(point.y):
            draws = False
            continue
        words.append(f"{'L' if draws else 'M'}{_place(point, x, y)}")
        draws = True
    return "".join(words)


def _place(point: ChartPoint, x: Axis, y: Axis) -> str:
    return f"{round(x.at(point.x) * _WIDE)} {round((1 - y.at(point.y)) * _HIGH)}"


def _area(band: Band, x: Axis, y: Axis) -> str:
    outline = [*band.high, *reversed(band.low)]
    known = [_place(point, x, y) for point in outline if math.isfinite(point.y)]
    return f'<path class="band c{band.color}" d="M{"L".join(known)}Z"/>' if known else ""


def _dots(line: Line, x: Axis, y: Axis) -> Iterator[str]:
    for point in line.points:
        if math.isfinite(point.y):
            place = f'cx="{_percent(x.at(point.x))}" cy="{_percent(1 - y.at(point.y))}"'
            title = escape(f"{line.label}: {point.y:.4g} at {point.x:.4g}")
            yield f'<circle class="dot c{line.color}" {place} r="4.5"><title>{title}</title></circle>'


def _bars(chart: BarChart) -> Iterator[str]:
    longest = max(math.fsum(bar.values) for bar in chart.bars) or 1.0
    for row, bar in enumerate(chart.bars):
        top = row * _ROW
        yield f'<text x="0" y="{top + 15}">{escape(bar.label)}</text>'
        remark = bar.remark or chart.format(math.fsum(bar.values))
        yield f'<text class="end quiet" x="100%" y="{top + 15}">{escape(remark)}</text>'
        begin = 0.0
        for part, color, value in zip(chart.parts, chart.colors, bar.values, strict=True):
            if value <= 0:
                continue
            title = escape(f"{part}: {chart.format(value)}")
            yield (
                f'<rect class="c{color}" x="{_percent(begin / longest)}" y="{top + 22}" '
                f'width="{_percent(value / longest)}" height="{_BAR}"><title>{title}</title></rect>'
            )
            begin += value


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%".replace(".00%", "%")
