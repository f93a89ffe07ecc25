"""The report's sections about the trials of a study. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.console.display import format_seconds
from jobs.report.charts import ChartPoint, Line, LineChart, NamedAxis, drawable
from jobs.report.figures import format_fact
from jobs.report.page import Section, Table
from jobs.report.results_folder import Run, as_number, read_pairs
from jobs.worker.tasks import SCORES, format_score


def trial_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of a study; none for other runs."""
    if not run.trials:
        return
    yield _trials(run)
    yield _curves(run)
    if len(_tried(run)) > 1:
        yield _options(run)


def _trials(run: Run) -> Section:
    metric = run.text("metric") or ""
    name = SCORES.get(metric, metric)
    rows, points = [], []
    for each in run.trials:
        number, score = _number(each), as_number(_part(each, "scores").get(metric))
        if score is not None:
            points.append(ChartPoint(number, score))
        said = str(each.get("failure") or each.get("state"))
        shown = said if score is None else format_score(metric, score, 2)
        tried = [format_fact(_part(each, "options").get(key)) for key in _tried(run)]
        seconds = as_number(each.get("seconds"))
        took = "" if seconds is None else format_seconds(seconds)
        rows.append((f"{number}{' (best)' if each.get('best') else ''}", shown, *tried, took))
    lines = [Line(name, points, 1, "dots")]
    chart = drawable(LineChart("", "trial", name, lines))
    shares = {key: n for key, v in _part(run.results, "importance").items() if (n := as_number(v))}
    parts = ", ".join(f"{key} {share:.0%}" for key, share in shares.items())
    remarks = [f"Share of the differences that each option explains: {parts}."] if parts else []
    header = ("trial", name, *_tried(run), "time")
    table = Table(header, rows)
    return Section("trials", "Trials of the study", chart, table, "No trial has a score.", remarks)


def _options(run: Run) -> Section:
    """The trials as lines through their options to their scores (parallel coordinates)."""
    metric = run.text("metric") or ""
    scored = [
        (each, {**_part(each, "options"), metric: float(format_score(metric, score, 2))})
        for each in run.trials
        if (score := as_number(_part(each, "scores").get(metric))) is not None
    ]
    keys = (*_tried(run), metric)
    axes = {key: scale for key in keys if (scale := _scale([each.get(key) for _, each in scored]))}
    lines = []
    for each, values in scored:
        ys = [scale.get(format_fact(values.get(key)), math.nan) for key, scale in axes.items()]
        lines.append(_line(each, [ChartPoint(*point) for point in enumerate(ys)]))
    lines.sort(key=lambda line: line.color)
    named = [
        NamedAxis(SCORES.get(key, key), next(iter(scale)), next(reversed(scale)))
        for key, scale in axes.items()
    ]
    note = "Each line is a trial with a score. The lowest value of each axis is below, the highest above."
    chart = drawable(LineChart(note, "", "", lines, named_axes=named))
    return Section("trial-options", "Options and scores", chart, None, "No trial has a score.")


def _scale(values: Sequence[Any]) -> dict[str, float]:
    """Return the place from 0 to 1 of each value by its text, lowest first.

    Numbers of a wide range are placed by their logarithm, as a study draws them; other values evenly, in
    their order.
    """
    known = {format_fact(value): as_number(value) for value in values if value is not None}
    numbers = {text: value for text, value in known.items() if value is not None}
    if len(numbers) < len(known):
        numbers = {text: float(place) for place, text in enumerate(sorted(known))}
    low, high = min(numbers.values(), default=0.0), max(numbers.values(), default=0.0)
    if low > 0 and high >= 20 * low:
        numbers = {text: math.log(value) for text, value in numbers.items()}
        low, high = math.log(low), math.log(high)
    wide = high - low
    places = {text: (value - low) / wide if wide else 0.5 for text, value in numbers.items()}
    return dict(sorted(places.items(), key=lambda item: item[1]))


def _curves(run: Run) -> Section:
    lines = []
    for each in run.trials:
        known = read_pairs(each.get("evaluations"))
        lines.append(_line(each, [ChartPoint(x, y) for x, y in known if not math.isnan(y)]))
    lines.sort(key=lambda line: line.color)
    has_pruned = any(each.get("state") == "pruned" for each in run.trials)
    note = "Trials that were not in the best third ended early." if has_pruned else ""
    chart = drawable(LineChart(note, "evaluation", "score", lines))
    title = "Scores of the trials while training"
    return Section("trial-scores", title, chart, None, "No trial was evaluated.")


def _line(trial: Mapping[str, Any], points: Sequence[ChartPoint]) -> Line:
    if trial.get("best"):
        return Line(f"trial {_number(trial)}, the best", points)
    return Line("other trials", points, 0, "faint")


def _tried(run: Run) -> list[str]:
    """Return the names of the options that the trials vary."""
    return list(dict.fromkeys(key for each in run.trials for key in _part(each, "options")))


def _number(trial: Mapping[str, Any]) -> int:
    return int(as_number(trial.get("trial")) or 0)


def _part(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object inside another; empty for anything else."""
    found = content.get(key)
    return found if isinstance(found, dict) else {}
