"""Charts as PNG files, by matplotlib: the extra `report`. What the page shows, drawn for slides."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from jobs.report.charts import BarChart, Chart, LineChart, axes

INSTALL = "pipx inject spr-cluster matplotlib, or pip install 'spr-cluster[report]'"
# The page's light palette, see style.css.
PALETTE = (
    *("#9aa4b2", "#2364c7", "#d9480f", "#c2255c", "#0b7a5e"),
    *("#7048c8", "#b58100", "#5f6b7a", "#1295a8"),
)
_STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.6},
    "faint": {"linewidth": 0.7, "alpha": 0.75},
    "dashed": {"linewidth": 1.2, "linestyle": "--"},
    "dots": {"linestyle": "none", "marker": "o", "markersize": 6},
}


def require_matplotlib() -> None:
    """Raises :class:`UsageError` with the way to install it, where it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--png needs matplotlib, which is not installed", hint=INSTALL)


def draw_png(chart: Chart, path: Path) -> None:
    """Write one picture of 1600 pixels' width. Raises ``OSError``."""
    from matplotlib.figure import Figure

    height = 1.2 + 0.55 * len(chart.bars) if isinstance(chart, BarChart) else 4.5
    figure = Figure(figsize=(10, max(2.4, height)), dpi=160, layout="constrained")
    plot = figure.add_subplot()
    plot.set_title(_plain(chart.title), loc="left", fontweight="bold")
    plot.spines[["top", "right"]].set_visible(False)
    if isinstance(chart, BarChart):
        _draw_bars(chart, plot)
    else:
        _draw_lines(chart, plot)
    figure.savefig(path, format="png")


def _draw_lines(chart: LineChart, plot: Any) -> None:
    x, y = axes(chart)
    for band in chart.bands:
        known = [p for p in zip(band.low, band.high, strict=True) if math.isfinite(p[0].y + p[1].y)]
        xs, low, high = ([p[0].x for p in known], [p[0].y for p in known], [p[1].y for p in known])
        label = _plain(band.label)
        plot.fill_between(xs, low, high, color=PALETTE[band.colour], alpha=0.3, lw=0, label=label)
    named = set[str]()
    for line in chart.lines:
        label = "_" if line.label in named else _plain(line.label)
        named.add(line.label)
        xs, ys = [p.x for p in line.points], [p.y for p in line.points]
        alone = {"marker": "o"} if len(xs) == 1 else {}
        colour = PALETTE[line.colour]
        plot.plot(xs, ys, color=colour, label=label, **{**_STYLES[line.style], **alone})
    plot.set(xlabel=chart.x_title, ylabel=chart.y_title, xlim=(x.low, x.high), ylim=(y.low, y.high))
    for axis, marks in ((plot.xaxis, x), (plot.yaxis, y)):
        axis.set_ticks([place for place, _ in marks.ticks], [text for _, text in marks.ticks])
    plot.grid(axis="y", color="#e3e7ed")
    plot.set_axisbelow(True)
    # Dots at the end of an axis are drawn whole.
    for artist in plot.lines:
        artist.set_clip_on(artist.get_marker() in ("None", None))
    if len(named) + len(chart.bands) > 1:
        plot.legend(frameon=False, fontsize="small")


def _draw_bars(chart: BarChart, plot: Any) -> None:
    labels = [_plain(f"{bar.label}  {bar.remark}".strip()) for bar in chart.bars]
    places = range(len(labels))
    left = [0.0] * len(labels)
    for index, (part, colour) in enumerate(zip(chart.parts, chart.colours, strict=True)):
        values = [bar.values[index] for bar in chart.bars]
        if sum(values) > 0:
            plot.barh(places, values, left=left, color=PALETTE[colour], label=part, height=0.6)
        left = [a + b for a, b in zip(left, values, strict=True)]
    plot.set_yticks(places, labels)
    plot.invert_yaxis()
    plot.set_xlabel("seconds")
    plot.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")
