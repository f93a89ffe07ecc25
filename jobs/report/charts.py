"""Charts as data, and as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, groupby
from typing import NamedTuple

from cluster.console.display import format_seconds

_LEAST = 1e-100
"""Smaller values can't be divided into ticks and are drawn as zero."""
_TICKS = 5


class ChartPoint(NamedTuple):
    """A point of a line; ``y`` is ``nan`` at a gap."""

    x: float
    y: float


@dataclass(frozen=True)
class Line:
    """``color`` is an index of the palette, 0 is gray. ``style``: line, faint, dashed, or dots."""

    label: str
    points: Sequence[ChartPoint]
    color: int = 1
    style: str = "line"


class NamedAxis(NamedTuple):
    """A vertical axis, and the text of its lowest and highest value."""

    name: str
    low: str
    high: str


@dataclass(frozen=True)
class LineChart:
    """Lines over a common x axis. ``note`` explains how to read the chart."""

    note: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    band: Sequence[Sequence[ChartPoint]] = ()
    """The lowest and the highest of many values, by x; the area between them is gray."""
    named_axes: Sequence[NamedAxis] = ()
    """Vertical axes at x = 0, 1, … instead of both others; y is from 0 to 1."""


@dataclass(frozen=True)
class Bar:
    """One stacked bar with a value for each of the chart's parts; ``label`` appears above it."""

    label: str
    values: Sequence[float]
    remark: str = ""


@dataclass(frozen=True)
class BarChart:
    """Horizontal stacked bars of seconds. ``colors`` are indices of the palette, by part."""

    note: str
    parts: Sequence[str]
    colors: Sequence[int]
    bars: Sequence[Bar]


Chart = LineChart | BarChart


class Axis(NamedTuple):
    """An axis from ``low`` to ``high`` with labeled ticks; :meth:`at` maps a value to 0.0 to 1.0."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def make_axis(low: float, high: float, *, whole: bool = False) -> Axis:
    """Return an axis from ``low`` to ``high`` with about five ticks at round numbers."""
    if not high - low > _LEAST:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / _TICKS)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    places = [(first + index) * step for index in range(count)]
    return Axis(low, high, tuple((place, format_tick(place, step)) for place in places))


def round_up(value: float) -> float:
    """Round a value up to a tick, as the end of an axis from 0."""
    if not value > _LEAST:
        return 1.0
    step = _round_step(value / _TICKS)
    return math.ceil(value / step - 1e-9) * step


def _round_step(rough: float) -> float:
    """Return 1, 2, 2.5, or 5 times a power of ten, at least ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * (1 - 1e-9))


def format_tick(value: float, step: float) -> str:
    """Format a tick with as many digits as its distance to the next one requires."""
    if abs(value) < step / 1e6:
        return "0"
    if step >= 1000 and abs(value) >= 10_000:
        return f"{value / 1000:,g}k" if abs(value) < 1e7 else f"{value / 1e6:,g}M"
    if abs(value) >= 1e6 or step < 1e-4:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    needs_one_more = abs(round(step, digits) - step) > step * 1e-6
    return f"{value:,.{digits + needs_one_more}f}"


def axes(chart: LineChart) -> tuple[Axis, Axis]:
    """Return x and y axes that contain the whole chart, from 0 if close to it."""
    if chart.named_axes:
        return Axis(0.0, max(1.0, len(chart.named_axes) - 1.0), ()), Axis(0.0, 1.0, ())
    drawn = [*(line.points for line in chart.lines), *chart.band]
    xs = [p.x for points in drawn for p in points if math.isfinite(p.y)]
    ys = [p.y for points in drawn for p in points if math.isfinite(p.y)]
    left = 0.0 if min(xs) <= 0.1 * max(xs) else min(xs)
    top = round_up(max(ys)) if max(ys) > 0 else 0.0
    bottom = -round_up(-min(ys)) if min(ys) < 0 else 0.0
    return make_axis(left, max(xs), whole=all(float(x).is_integer() for x in xs)), make_axis(
        bottom, top
    )


def thin(points: Sequence[ChartPoint], bins: int) -> tuple[list[ChartPoint], list[ChartPoint]]:
    """Return the lowest and highest point in each of ``bins`` intervals of x, so no outlier is lost.

    An interval is a gap only if it has no finite values.
    """
    if not points:
        return [], []
    first, last = points[0].x, points[-1].x
    width = (last - first) / bins or 1.0
    low, high = list[ChartPoint](), list[ChartPoint]()
    for _, part in groupby(points, lambda p: min(int((p.x - first) / width), bins - 1)):
        begin, *others = part
        known = [p.y for p in (begin, *others) if math.isfinite(p.y)] or [math.nan]
        low.append(begin._replace(y=min(known)))
        high.append(begin._replace(y=max(known)))
    return low, high


def smooth(points: Sequence[ChartPoint], window: int) -> list[ChartPoint]:
    """Return the mean of the ``window`` points around each, fewer at the ends; gaps stay gaps."""
    known = [math.isfinite(point.y) for point in points]
    sums = [0.0, *accumulate(p.y if k else 0.0 for p, k in zip(points, known, strict=True))]
    counts = [0, *accumulate(known)]
    half = window // 2
    result = []
    for index, point in enumerate(points):
        begin, end = max(0, index - half), min(len(points), index + half + 1)
        count = counts[end] - counts[begin]
        mean = (sums[end] - sums[begin]) / count if count else math.nan
        result.append(ChartPoint(point.x, mean if known[index] else math.nan))
    return result


def sample(points: Sequence[ChartPoint], count: int) -> list[ChartPoint]:
    """Return at most ``count`` evenly spaced points, including the first and the last."""
    if len(points) <= count:
        return list(points)
    step = (len(points) - 1) / (count - 1)
    return [points[round(index * step)] for index in range(count)]


def drawable(chart: LineChart) -> LineChart | None:
    """Return the chart without empty lines; ``None`` if no line is left."""
    lines = [line for line in chart.lines if any(math.isfinite(p.y) for p in line.points)]
    return replace(chart, lines=lines) if lines else None


_WIDE, _HIGH = 2000, 1000
_HEIGHT = 240
_ROW, _BAR = 46, 18


def render_svg(name: str, title: str, chart: Chart) -> str:
    """Return one ``<svg>`` with a title and a description for screen readers."""
    if isinstance(chart, BarChart):
        kind, height, content = "bars", _ROW * len(chart.bars), "".join(_bars(chart))
    else:
        kind, height, content = "plot", _HEIGHT, "".join(_lines(chart))
    return (
        f'<svg class="{kind}" id="chart-{name}" role="img" width="100%" height="{height}" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(chart.note)}</desc>{content}</svg>'
    )


def _lines(chart: LineChart) -> Iterator[str]:
    x, y = axes(chart)
    yield from _named_axes(chart.named_axes) if chart.named_axes else _grid(x, y)
    yield (
        f'<svg class="data" width="100%" height="100%" viewBox="0 0 {_WIDE} {_HIGH}" '
        'preserveAspectRatio="none">'
    )
    if chart.band:
        yield _area(chart.band, x, y)
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


def _named_axes(axes: Sequence[NamedAxis]) -> Iterator[str]:
    """Draw vertical axes with their names below, in two rows so that neighbors have space."""
    for number, axis in enumerate(axes):
        place = _percent(number / max(1, len(axes) - 1))
        yield f'<line class="axis" x1="{place}" x2="{place}" y1="0" y2="100%"/>'
        side = ("start", "middle", "end")[(number > 0) + (0 < number == len(axes) - 1)]
        rows = (
            (-8, axis.high),
            (_HEIGHT + 16, axis.low),
            (_HEIGHT + 31 + 14 * (number % 2), axis.name),
        )
        for y, text in rows:
            yield f'<text class="{side}" x="{place}" y="{y}">{escape(text)}</text>'


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


def _area(band: Sequence[Sequence[ChartPoint]], x: Axis, y: Axis) -> str:
    low, high = band
    outline = [*high, *reversed(low)]
    known = [_place(point, x, y) for point in outline if math.isfinite(point.y)]
    return f'<path class="band c0" d="M{"L".join(known)}Z"/>' if known else ""


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
        remark = bar.remark or format_seconds(math.fsum(bar.values))
        yield f'<text class="end quiet" x="100%" y="{top + 15}">{escape(remark)}</text>'
        begin = 0.0
        for part, color, value in zip(chart.parts, chart.colors, bar.values, strict=True):
            if value <= 0:
                continue
            title = escape(f"{part}: {format_seconds(value)}")
            yield (
                f'<rect class="c{color}" x="{_percent(begin / longest)}" y="{top + 22}" '
                f'width="{_percent(value / longest)}" height="{_BAR}"><title>{title}</title></rect>'
            )
            begin += value


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%".replace(".00%", "%")
