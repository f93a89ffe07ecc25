"""The report as data: tiles, charts with their tables, or the reason why there is none. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from cluster.console.display import format_seconds
from infra.words import counted
from jobs.report import figures
from jobs.report.charts import (
    Bar,
    BarChart,
    ChartPoint,
    Line,
    LineChart,
    drawable,
    sample,
    smooth,
    thin,
)
from jobs.report.figures import (
    HourlyPrice,
    Shares,
    format_fact,
    format_number,
    format_usd,
    time_unit,
)
from jobs.report.page import EPOCH, RUN, Report, Section, Table, Tile
from jobs.report.receipt import make_receipt
from jobs.report.results_folder import PARTS, Run, as_number
from jobs.report.trials import trial_sections
from jobs.worker.tasks import PLAIN_SCORES, SCORES, format_score

_FACTS = {
    "model": "model",
    "pushed_to": "on the hub",
    "data": "training data",
    "eval_data": "evaluation data",
    "train_records": "training records",
    "train_samples": "training samples",
    "recipe": "recipe",
    "epochs": "epochs",
    "batch_size_per_rank": "batch per rank",
    "learning_rate": "learning rate",
    "no_answer_threshold": "threshold for no answer",
    "seed": "seed",
    "world_size": "ranks",
    "backend": "backend",
    "dtype": "precision",
    "amx": "AMX on every node",
}


def subtitle_of(run: Run) -> str:
    """Return one line about the run."""
    ranks, nodes = run.number("world_size") or len(run.series), run.nodes
    parts = [run.text("model"), run.text("data") and f"trained on {run.text('data')}"]
    where = counted(round(ranks), "rank") if ranks else ""
    where = counted(len(run.trials), "trial") if run.trials else where
    where += f" on {counted(nodes, 'node')}" if where and nodes else ""
    parts += [where, run.text("backend"), run.text("dtype"), run.text("recipe")]
    return " · ".join(filter(None, parts))


def tiles_of(run: Run, price: HourlyPrice | None) -> Iterator[Tile]:
    """Yield the known key figures."""
    anchors = run.number("anchors")  # of `embed`
    records, kind = anchors or run.number("eval_records"), "anchor" if anchors else "record"
    for name, value in figures.scores(run).items():
        # A score of some records, such as has_answer_f1, has their number beside it.
        count = run.number(f"{name.rpartition('_')[0]}_total") or records
        of = f"of {counted(round(count), kind)}" if count else ""
        unit = "" if name in PLAIN_SCORES else " %"
        yield Tile(SCORES.get(name, name), f"{format_score(name, value)}{unit}", of)
    if (speed := run.number("samples_per_second")) is not None:
        yield Tile(
            "Training",
            f"{speed:,.1f}",
            "samples/s, one trial" if run.trials else "samples/s, all ranks",
        )
    if (tokens := figures.tokens_per_second(run)) is not None:
        share = figures.padding_share(run)
        yield Tile("Tokens", f"{tokens:,.0f}", "tokens/s, excluding padding")
        if share is not None:
            yield Tile("Padding", f"{100 * share:.1f} %", "of all computed tokens")
    if (seconds := run.seconds.get("total")) is not None:
        yield Tile("Whole run", format_seconds(seconds), "")
    if (epoch := figures.epoch_seconds(run)) is not None:
        yield Tile("Epoch", format_seconds(epoch), "training only")
        if price:
            yield Tile("Cost per epoch", format_usd(price.usd(epoch)), price.source)
        else:
            yield Tile("Cost per epoch", "–", "price unknown")


def warnings_of(run: Run) -> Iterator[str]:
    """Yield warnings about the validity of the figures."""
    if not run.results:
        yield "No results.json: this run did not finish, or its results are elsewhere."
    elif not run.series and not run.trials:
        yield "No metrics/rank-N.jsonl: the steps of the ranks are unknown."
    unread = sum(series.unreadable for series in run.series)
    if unread:
        yield f"Skipped {counted(unread, 'unreadable line')} of the metrics."
    resumed = run.results.get("resumed_after")
    if isinstance(resumed, list) and resumed:
        after = ", ".join(map(format_fact, resumed[:20]))
        yield f"This run was interrupted and resumed after step {after}."
    again = max((series.repeated for series in run.series), default=0)
    if again:
        yield f"{counted(again, 'step')} repeated after a resume; the figures are from the repetition."
    if not_pushed := run.text("push_error"):
        yield f"{not_pushed}."
    size = run.number("world_size")
    if run.series and size and len(run.series) != size:
        yield f"Metrics are available for {len(run.series)} of {size:.0f} ranks."
    lost = sum(not math.isfinite(loss) for _, loss in losses_of(run))
    if lost:
        yield f"The loss is not finite at {counted(lost, 'step')}."
    names = ", ".join(SCORES.get(name, name) for name in figures.scores(run))
    if names and run.text("data") == run.text("eval_data") is not None:
        yield f"{names}: measured on the training data, not on unseen data."


def losses_of(run: Run) -> list[ChartPoint]:
    """Return the loss by step, from the first rank's metrics or else from the results."""
    return _by_step(run, "loss") or [ChartPoint(*pair) for pair in run.loss_curve]


def _by_step(run: Run, column: str) -> list[ChartPoint]:
    """Return a column of the first rank's metrics."""
    first = run.series[:1]
    return [ChartPoint(*pair) for s in first for pair in zip(s.step, s[column], strict=True)]


def facts_of(run: Run) -> Iterator[tuple[str, str]]:
    """Yield names and values of the environment."""
    reasons = {"backend": "backend_reason", "dtype": "dtype_reason"}
    for key, label in _FACTS.items():
        value = run.results.get(key)
        if value is None or value == "":
            continue
        text = ("yes" if value else "no") if isinstance(value, bool) else format_fact(value)
        reason = run.text(reasons.get(key, ""))
        yield label, f"{text}: {reason}" if reason else text
    versions = run.results.get("versions")
    for name, value in versions.items() if isinstance(versions, dict) else ():
        yield str(name), format_fact(value)
    for key in ("job", "cluster", "cloud", "region", "stack", "command", "when"):
        if isinstance(run.job.get(key), str):
            yield key, run.job[key]
    if run.instance_types:
        names = run.instance_types
        yield "machines", ", ".join(f"{names.count(n)} × {n}" for n in dict.fromkeys(names))


def confusion_of(run: Run) -> Table | None:
    """Return the confusion matrix; ``None`` if the results have none."""
    classes, matrix = (run.results.get(key) for key in ("classes", "confusion"))
    if not isinstance(classes, list) or not isinstance(matrix, list) or not matrix:
        return None
    names = [format_fact(name) for name in classes]
    counts = [row for row in matrix if isinstance(row, list) and len(row) == len(names)]
    if not len(names) == len(matrix) == len(counts):
        return None
    rows = [(name, *map(format_fact, row)) for name, row in zip(names, counts, strict=True)]
    return Table(("true \\ predicted", *names), rows)


def placement_of(run: Run) -> Table | None:
    """Return where each rank ran; ``None`` if the results name no ranks."""
    rows = [
        (
            format_fact(rank.get("rank")),
            format_fact(rank.get("hostname")),
            *(_both(rank, key) for key in ("cpus", "threads", "memory", "workers")),
        )
        for rank in run.ranks
    ]
    header = ("rank", "node", "CPUs", "threads", "memory", "oneCCL's CPUs")
    return Table(header, rows, numeric=False) if rows else None


def _both(rank: Mapping[str, Any], key: str) -> str:
    """Return the found value, and the planned one if it differs."""
    parts = (rank.get(name) for name in ("planned", "found"))
    plan, real = (part.get(key) if isinstance(part, dict) else None for part in parts)
    text = "–" if real in (None, "") else str(real)
    if plan in (None, ""):
        return f"{text} (not planned)" if text != "–" else text
    return f"{text} (as planned)" if plan == real else f"{text} (planned: {plan})"


_BINS = 360
"""Intervals of a thinned line: about one per two pixels of a wide page."""
_MOST_LINES = 8
_BUDGET = 12_000
"""Limit for the points of all ranks together, so that the page stays small with hundreds of ranks."""
_TABLE_ROWS = 20
COLORS = {
    figures.PREPARATION: 8,
    "data": 6,
    "forward": 1,
    "backward": 2,
    "communication": 3,
    "optimizer": 4,
    "training": 1,
    figures.EVALUATION: 5,
    figures.SAVING: 7,
    figures.OTHER: 0,
}


def build_report(run: Run, others: Sequence[Run], price: HourlyPrice | None) -> Report:
    """Build the report of a run; ``others`` are compared with it for scaling."""
    times = {EPOCH: figures.epoch_seconds(run), RUN: run.seconds.get("total")}
    return Report(
        title=run.name,
        subtitle=subtitle_of(run),
        tiles=list(tiles_of(run, price)),
        warnings=list(warnings_of(run)),
        sections=[
            *trial_sections(run),
            _loss(run),
            _learning_rate(run),
            *([_evaluations(run)] if run.evaluations else []),
            _throughput(run, "samples", "samples/s", "Samples per second of each rank"),
            _throughput(run, "tokens", "tokens/s", "Tokens per second of each rank"),
            _whole_run(run),
            _by_rank(run),
            _scaling(run, others),
        ],
        facts=list(facts_of(run)),
        placement=placement_of(run),
        confusion=confusion_of(run),
        price=price,
        times={name: seconds for name, seconds in times.items() if seconds is not None},
        like_published=figures.is_like_published(run),
        receipt=make_receipt(run, price),
    )


def _loss(run: Run) -> Section:
    points = losses_of(run)
    window = max(1, len(points) // 40) | 1
    lines = [Line("every step", points, 1)]
    band: Sequence[Sequence[ChartPoint]] = ()
    if window > 1:
        middle = sample(smooth(points, window), _BINS)
        lines = [Line(f"mean of {window:,} steps", middle, 1)]
        if len(points) > 2 * _BINS:
            band = thin(points, min(_BINS, len(points) // 6))
        else:
            lines = [Line("every step", points, 0, "faint"), *lines]
    chart = drawable(
        LineChart(_loss_note(points, window), "step", "loss, mean of all ranks", lines, band)
    )
    rows = [(f"{p.x:,.0f}", format_number(p.y)) for p in sample(points, _TABLE_ROWS)]
    return Section("loss", "Loss", chart, Table(("step", "loss"), rows), _no_metrics("losses"))


def _loss_note(points: Sequence[ChartPoint], window: int) -> str:
    known = [point for point in points if math.isfinite(point.y)]
    if not known:
        return ""
    ends = f"From {known[0].y:.3g} to {known[-1].y:.3g} in {counted(len(points), 'step')}."
    how = f" The line is a moving average over {window:,} steps." if window > 1 else ""
    shade = " The shaded area contains every step." if len(points) > 2 * _BINS else ""
    return ends + how + shade


def _no_metrics(what: str) -> str:
    return f"No data: the folder contains no {what}."


def _learning_rate(run: Run) -> Section:
    points = _by_step(run, "lr")
    line = Line("learning rate", thin(points, _BINS)[1], 4)
    highest = max((p.y for p in points if math.isfinite(p.y)), default=math.nan)
    note = f"Highest: {highest:.3g}." if math.isfinite(highest) else ""
    chart = drawable(LineChart(note, "step", "learning rate", [line]))
    rows = [(f"{p.x:,.0f}", format_number(p.y)) for p in sample(points, _TABLE_ROWS)]
    table = Table(("step", "learning rate"), rows)
    return Section("lr", "Learning rate", chart, table, _no_metrics("learning rates"))


def _evaluations(run: Run) -> Section:
    names = list(dict.fromkeys(name for _, scores in run.evaluations for name in scores))
    titles = [SCORES.get(name, name) for name in names]
    lines = [
        Line(title, [ChartPoint(step, s[name]) for step, s in run.evaluations if name in s], color)
        for color, (name, title) in enumerate(zip(names, titles, strict=True), start=1)
    ]
    step = run.number("model_step")
    note = "" if step is None else f"The model is that of step {step:,.0f}."
    chart = drawable(LineChart(note, "step", "score", lines[:_MOST_LINES]))
    rows = [
        (format_fact(step), *(format_fact(scores.get(name)) for name in names))
        for step, scores in run.evaluations[-_TABLE_ROWS:]
    ]
    return Section("evaluations", "Scores while training", chart, Table(("step", *titles), rows))


def _throughput(run: Run, column: str, unit: str, title: str) -> Section:
    steps = max((len(series) for series in run.series), default=0)
    # Batches differ in size, so each interval covers several steps if there are enough.
    bins = min(max(steps // 8, min(steps, 10)), 120, _BUDGET // max(1, len(run.series)))
    found = {series.rank: figures.rates(series, column, max(1, bins)) for series in run.series}
    by_rank = {rank: points for rank, points in found.items() if points}
    span = max((points[-1].x for points in by_rank.values()), default=0.0)
    divisor, x_title = time_unit(span)
    scaled = {
        rank: [ChartPoint(p.x / divisor, p.y) for p in points] for rank, points in by_rank.items()
    }
    means = {rank: sum(p.y for p in points) / len(points) for rank, points in by_rank.items()}
    note, lines = _rank_note(means, unit), _rank_lines(scaled, means)
    chart = drawable(LineChart(note, x_title, unit, lines))
    rows = [(str(rank), f"{mean:,.1f}", _extremes(by_rank[rank])) for rank, mean in means.items()]
    table = Table(("rank", f"{unit}, mean", "lowest – highest"), rows)
    return Section(column, title, chart, table, _no_metrics(f"{column} of each rank's steps"))


def _rank_lines(scaled: Mapping[int, list[ChartPoint]], means: Mapping[int, float]) -> list[Line]:
    """Return a line per rank; with many ranks, all but the slowest and the median are gray."""
    if len(scaled) <= _MOST_LINES:
        return [
            Line(f"rank {rank}", points, index + 1)
            for index, (rank, points) in enumerate(scaled.items())
        ]
    ordered = sorted(means, key=means.__getitem__)
    slowest, middle = ordered[0], ordered[len(ordered) // 2]
    others = [
        Line("other ranks", points, 0, "faint")
        for rank, points in scaled.items()
        if rank not in (slowest, middle)
    ]
    return [
        *others,
        Line(f"median: rank {middle}", scaled[middle], 1),
        Line(f"slowest: rank {slowest}", scaled[slowest], 2),
    ]


def _rank_note(means: Mapping[int, float], unit: str) -> str:
    if not means:
        return ""
    total = f"{sum(means.values()):,.1f} {unit} together."
    if len(means) < 2:
        return total
    slowest, usual = min(means, key=means.__getitem__), median(means.values())
    share = means[slowest] / usual - 1 if usual else 0.0
    if share > -0.005:
        return f"{total} All ranks are equally fast."
    return f"{total} The slowest is rank {slowest}, {-share:.1%} below the median."


def _extremes(points: Sequence[ChartPoint]) -> str:
    return f"{min(p.y for p in points):,.1f} – {max(p.y for p in points):,.1f}"


def _whole_run(run: Run) -> Section:
    shares = {name: seconds for name, seconds in figures.run_shares(run).items() if seconds > 0}
    places = {name: place for place, name in enumerate(COLORS)}
    # Unknown phases come with the last known one.
    known = {name: places.get(name, places[figures.SAVING]) for name in shares}
    ordered = {name: shares[name] for name in sorted(shares, key=known.__getitem__)}
    total = sum(ordered.values())
    chart = None
    if total > 0:
        split = run.series and "train" in run.seconds
        note = "Training is split by the average of the ranks' steps." if split else ""
        bar = Bar(f"Whole run: {format_seconds(total)}", [*ordered.values()], " ")
        chart = _bar_chart(note, [*ordered], [bar])
    rows = [(name, f"{s:,.1f}", f"{s / total:.1%}") for name, s in ordered.items()]
    table = Table(("", "seconds", "share"), rows)
    return Section("time", "Time by phase", chart, table, _no_metrics("phases (results.json)"))


def _bar_chart(note: str, parts: Sequence[str], bars: Sequence[Bar]) -> BarChart:
    return BarChart(note, parts, [COLORS.get(part, 7) for part in parts], bars)


def _by_rank(run: Run) -> Section:
    title = "Training by rank"
    parts = (*PARTS, figures.OTHER)
    known = [series for series in run.series if len(series) and series["time"][-1] > 0]
    shares = {
        series.rank: figures.split_phase("train", series["time"][-1], [series]) for series in known
    }
    if not any(row[part] > 0 for row in shares.values() for part in PARTS):
        return Section("ranks", title, None, None, _no_metrics("seconds of each rank's steps"))
    shown, remarks = sorted(shares, key=lambda rank: _communication(shares[rank])), []
    if len(shown) > 16:
        remarks = [
            f"Shown: of {len(shown)} ranks, the 8 that waited least and the 8 that waited most."
        ]
        shown = [*shown[:8], *shown[-8:]]
    hosts = {as_number(rank.get("rank")): str(rank.get("hostname", "")) for rank in run.ranks}
    bars = [_rank_bar(rank, hosts.get(rank), shares[rank]) for rank in sorted(shown)]
    note = (
        "Communication is the time that a rank waits beyond its backward pass. The slowest rank "
        "waits least; the others wait for it."
    )
    rows = [(str(rank), *(f"{s:,.1f}" for s in row.values())) for rank, row in shares.items()]
    table = Table(("rank", *(f"{part}, s" for part in parts)), rows)
    chart = _bar_chart(f"{note} {_slowest(shares)}".strip(), parts, bars)
    return Section("ranks", title, chart, table, remarks=remarks)


def _rank_bar(rank: int, host: str | None, shares: Shares) -> Bar:
    label = f"rank {rank} on {host}" if host else f"rank {rank}"
    return Bar(label, [*shares.values()], f"{_communication(shares):.0%} communication")


def _slowest(shares: Mapping[int, Shares]) -> str:
    """Name the rank that clearly waits less than the others, if any."""
    waited = {rank: _communication(row) for rank, row in shares.items()}
    usual, least = median(waited.values()), min(waited, key=waited.__getitem__)
    if len(waited) < 2 or usual < 0.02 or waited[least] > 0.8 * usual:
        return ""
    return f"Here, rank {least} waits {waited[least]:.0%} of the time; the median is {usual:.0%}."


def _communication(shares: Shares) -> float:
    """Return the share of communication, 0.0 to 1.0."""
    return shares["communication"] / (sum(shares.values()) or 1.0)


def _scaling(run: Run, others: Sequence[Run]) -> Section:
    title, runs = "Scaling", [run, *others]
    found = figures.speedups(runs)
    if not found:
        missing = "No data: needs runs on different numbers of nodes. Add one with --compare DIR."
        return Section("scaling", title, None, None, missing)
    fewest, published = found[0].nodes, figures.PUBLISHED_SPEEDUPS
    if fewest > 1 or not all(map(figures.is_like_published, runs)):
        published = {}
    most = max([found[-1].nodes, *published])
    lines = [
        Line("ideal", [ChartPoint(fewest, 1.0), ChartPoint(most, most / fewest)], 0, "dashed"),
        Line("these runs", [ChartPoint(s.nodes, s.speedup) for s in found], 1, "dots"),
    ]
    if published:
        points = [ChartPoint(n, speedup) for n, speedup in published.items()]
        label = f"published, {figures.PUBLISHED}: 26 min on 1, 7 min 30 on 4"
        lines.append(Line(label, points, 2, "dots"))
    note = f"Speedup over {counted(fewest, 'node')}, by samples per second."
    chart = LineChart(note, "nodes", "speedup", lines)
    rows = [
        (str(s.nodes), f"{s.speed:,.1f}", f"{s.speedup:.2f} ×", f"{s.efficiency:.0%}", s.name)
        for s in found
    ]
    rows += [
        (str(n), "–", f"{speedup:.2f} ×", f"{speedup / n:.0%}", f"published, {figures.PUBLISHED}")
        for n, speedup in published.items()
    ]
    table = Table(("nodes", "samples/s", "speedup", "efficiency", "run"), rows)
    unlike = figures.differences(runs)
    remarks = [f"Compare with care: these runs differ in {', '.join(unlike)}."] if unlike else []
    return Section("scaling", title, chart, table, remarks=remarks)
