"""Charts as data: what is drawn, whatever draws it (:mod:`.svg` for the page, :mod:`.png`). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_LEAST = 1e-100
"""What is smaller can't be divided into ticks, and is drawn as zero."""
Format = Callable[[float], str]


class Point(NamedTuple):
    """``y`` is ``nan`` where a line is interrupted."""

    x: float
    y: float


@dataclass(frozen=True)
class Line:
    """``colour`` counts the palette from 1, 0 is grey. ``style``: line, faint, dashed or dots."""

    label: str
    points: Sequence[Point]
    colour: int = 1
    style: str = "line"


@dataclass(frozen=True)
class Band:
    """The area between the least and the greatest of many values, by x."""

    label: str
    low: Sequence[Point]
    high: Sequence[Point]
    colour: int = 1


@dataclass(frozen=True)
class LineChart:
    """Lines over a common x. Both axes begin at 0, or at the least x. ``note`` says how to read it."""

    name: str
    title: str
    note: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    whole_x: bool = False
    """x is counted: ticks are whole numbers."""


@dataclass(frozen=True)
class Bar:
    """One bar of several parts, as long as ``parts`` of the chart; ``label`` is written above it."""

    label: str
    values: Sequence[float]
    remark: str = ""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars of stacked parts. ``colours`` count the palette, by part."""

    name: str
    title: str
    note: str
    parts: Sequence[str]
    colours: Sequence[int]
    bars: Sequence[Bar]
    format: Format


Chart = LineChart | BarChart


class Axis(NamedTuple):
    """From ``low`` to ``high``, with labelled places between; :meth:`at` gives 0.0 to 1.0."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def make_axis(low: float, high: float, *, whole: bool = False, wanted: int = 5) -> Axis:
    """An axis that holds both values, with about as many ticks at round numbers."""
    if not high - low > _LEAST:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / wanted)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    places = [(first + index) * step for index in range(count)]
    return Axis(low, high, tuple((place, format_tick(place, step)) for place in places))


def round_up(value: float, wanted: int = 5) -> float:
    """The end of an axis from 0 that holds a value, at a tick."""
    if not value > _LEAST:
        return 1.0
    step = _round_step(value / wanted)
    return math.ceil(value / step - 1e-9) * step


def _round_step(rough: float) -> float:
    """1, 2, 2.5 or 5 times a power of ten, at least ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * (1 - 1e-9))


def format_tick(value: float, step: float) -> str:
    """As many digits as ticks of that distance need."""
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
    """The chart's x and y axes, holding all that it draws."""
    drawn = [*(line.points for line in chart.lines)]
    drawn += [points for band in chart.bands for points in (band.low, band.high)]
    xs = [p.x for points in drawn for p in points if math.isfinite(p.y)]
    ys = [p.y for points in drawn for p in points if math.isfinite(p.y)]
    left = 0.0 if min(xs) <= 0.1 * max(xs) else min(xs)
    top = round_up(max(ys)) if max(ys) > 0 else 0.0
    bottom = -round_up(-min(ys)) if min(ys) < 0 else 0.0
    return make_axis(left, max(xs), whole=chart.whole_x), make_axis(bottom, top)


def thin(points: Sequence[Point], bins: int) -> tuple[list[Point], list[Point]]:
    """The least and the greatest of each of ``bins`` parts of x: nothing that stands out is lost.

    Values that are not finite leave a gap only where a part has no others.
    """
    if not points:
        return [], []
    first, last = points[0].x, points[-1].x
    width = (last - first) / bins or 1.0
    low: list[Point] = []
    high: list[Point] = []
    current = -1
    for point in points:
        part = min(int((point.x - first) / width), bins - 1)
        if part != current:
            current = part
            low.append(point)
            high.append(point)
        else:
            low[-1] = _choose(low[-1], point, min)
            high[-1] = _choose(high[-1], point, max)
    return low, high


def _choose(known: Point, new: Point, best: Callable[[float, float], float]) -> Point:
    if not math.isfinite(new.y):
        return known
    if not math.isfinite(known.y):
        return replace_y(known, new.y)
    return replace_y(known, best(known.y, new.y))


def replace_y(point: Point, y: float) -> Point:
    """The same place with another value."""
    return Point(point.x, y)


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of the ``window`` points around each, fewer at the ends; gaps stay gaps."""
    sums, counts = [0.0], [0]
    for point in points:
        known = math.isfinite(point.y)
        sums.append(sums[-1] + (point.y if known else 0.0))
        counts.append(counts[-1] + known)
    half = window // 2
    result = []
    for index, point in enumerate(points):
        begin, end = max(0, index - half), min(len(points), index + half + 1)
        count = counts[end] - counts[begin]
        mean = (sums[end] - sums[begin]) / count if count else math.nan
        result.append(Point(point.x, mean if math.isfinite(point.y) else math.nan))
    return result


def sample(points: Sequence[Point], count: int) -> list[Point]:
    """At most so many of the points, evenly, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    step = (len(points) - 1) / (count - 1)
    return [points[round(index * step)] for index in range(count)]


def has_points(line: Line) -> bool:
    """There is something to draw."""
    return any(math.isfinite(point.y) for point in line.points)


def drawable(chart: LineChart) -> LineChart | None:
    """The chart without lines that have nothing; ``None`` where nothing is left."""
    lines = [line for line in chart.lines if has_points(line)]
    return replace(chart, lines=lines) if lines else None
