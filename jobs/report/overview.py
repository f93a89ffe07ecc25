"""The report without its charts: key figures, warnings, environment, and placement. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from infra.words import counted
from jobs.report import figures
from jobs.report.charts import ChartPoint
from jobs.report.contents import Table, Tile
from jobs.report.figures import Cost
from jobs.report.formatting import format_duration, format_fact, format_usd
from jobs.report.results_folder import Run

_FACTS = {
    "model": "model",
    "data": "training data",
    "eval_data": "evaluation data",
    "train_records": "training records",
    "train_samples": "training samples",
    "recipe": "recipe",
    "epochs": "epochs",
    "batch_size_per_rank": "batch per rank",
    "learning_rate": "learning rate",
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
    where += f" on {counted(nodes, 'node')}" if where and nodes else ""
    parts += [where, run.text("backend"), run.text("dtype"), run.text("recipe")]
    return " · ".join(filter(None, parts))


def tiles_of(run: Run, cost: Cost | None) -> Iterator[Tile]:
    """Yield the known key figures."""
    records = run.number("eval_records") or run.number("eval_questions")
    of = f"of {counted(round(records), 'record')}" if records else ""
    for label, value in figures.scores(run).items():
        yield Tile(label, f"{value:.1f} %", of)
    if (speed := run.number("samples_per_second")) is not None:
        yield Tile("Training", f"{speed:,.1f}", "samples/s, all ranks")
    if (tokens := figures.tokens_per_second(run)) is not None:
        share = figures.padding_share(run)
        yield Tile("Tokens", f"{tokens:,.0f}", "tokens/s, excluding padding")
        if share is not None:
            yield Tile("Padding", f"{100 * share:.1f} %", "of all computed tokens")
    if (seconds := run.seconds.get("total")) is not None:
        yield Tile("Whole run", format_duration(seconds), "")
    if (epoch := figures.epoch_seconds(run)) is not None:
        yield Tile("Epoch", format_duration(epoch), "training only")
    if cost is not None and cost.epoch is not None:
        yield Tile("Cost per epoch", format_usd(cost.epoch), cost.price.source)
    elif "samples_per_second" in run.results:
        yield Tile("Cost per epoch", "–", "price unknown")


def warnings_of(run: Run) -> Iterator[str]:
    """Yield what limits the validity of the figures."""
    if not run.results and (run.series or not run.study):
        yield "No results.json: this run did not finish, or its results are elsewhere."
    elif run.results and not run.series:
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
    size = run.number("world_size")
    if run.series and size and len(run.series) != size:
        yield f"Metrics are available for {len(run.series)} of {size:.0f} ranks."
    lost = sum(not math.isfinite(loss) for _, loss in losses_of(run))
    if lost:
        yield f"The loss is not finite at {counted(lost, 'step')}."
    if figures.scores(run) and run.text("data") == run.text("eval_data") is not None:
        yield "F1 and exact match are measured on the training data, not on unseen data."


def losses_of(run: Run) -> list[ChartPoint]:
    """Return the loss by step, from the first rank's metrics or else from the results."""
    if run.series:
        first = run.series[0]
        return [ChartPoint(*pair) for pair in zip(first.step, first["loss"], strict=True)]
    return [ChartPoint(*pair) for pair in run.loss_curve]


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
    """Return how often each class was taken for each; ``None`` if the results have no such counts."""
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
    rows = []
    for rank in run.ranks:
        planned, found = rank.get("planned"), rank.get("found")
        rows.append(
            (
                format_fact(rank.get("rank")),
                format_fact(rank.get("hostname")),
                *(_both(planned, found, key) for key in ("cpus", "threads", "memory", "workers")),
            )
        )
    header = ("rank", "node", "CPUs", "threads", "memory", "oneCCL's CPUs")
    return Table(header, rows, numeric=False) if rows else None


def _both(planned: Any, found: Any, key: str) -> str:
    """Return the found value, and the planned one if it differs."""
    plan = planned.get(key) if isinstance(planned, dict) else None
    real = found.get(key) if isinstance(found, dict) else None
    text = "–" if real in (None, "") else str(real)
    if plan in (None, ""):
        return f"{text} (not planned)" if text != "–" else text
    return f"{text} (as planned)" if plan == real else f"{text} (planned: {plan})"
