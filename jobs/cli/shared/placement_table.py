"""A study of the speed as a table and as rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from cluster.console.display import format_table
from jobs.experiments.placement_study import PlacementStudy, Trial


def render_speeds(study: PlacementStudy, usd_per_hour: float | None) -> Iterator[str]:
    """Render the trials, fastest first, and what is kept. ``usd_per_hour`` is a node's price."""
    header = ("nodes", "ppn", "workers", "threads", "batch", "samples/s", "step", "of ideal")
    rows = sorted(study.results, key=lambda each: -(study.results[each].samples_per_second or 0))
    priced = (*header, "$ per million") if usd_per_hour else header
    yield format_table([priced, *(_cells(study, each, usd_per_hour) for each in rows)])
    best = study.best
    if len({each.nodes for each in rows}) > 1:
        yield (
            "Of ideal: the speed per node, relative to the best one on the fewest nodes. Each rank keeps "
            "its batch, as with `train --nodes`."
        )
    if usd_per_hour:
        yield "$ per million samples: on demand, machines alone."
    if study.kept:
        words = [f"--ppn {best.nproc_per_node}"]
        words += [f"--ccl-workers {best.ccl_workers}"] if best.ccl_workers else []
        words += [f"--batch-size {best.batch_size}"] if study.kept.batch_size else []
        yield (
            f"Kept on the head for {study.kept.key.model} on stack {study.kept.key.stack}: "
            f"{' '.join(words)}. `train` uses it unless you set these options."
        )


def _cells(study: PlacementStudy, trial: Trial, usd_per_hour: float | None) -> tuple[str, ...]:
    done, share = study.results[trial], study.efficiency(trial)
    known = (
        str(trial.nodes),
        str(trial.nproc_per_node),
        str(trial.ccl_workers or "-"),
        str(done.threads or "-"),
        str(trial.batch_size),
    )
    more = ("",) if usd_per_hour else ()
    if not done.samples_per_second or not done.step_s or share is None:
        return (*known, f"failed: {done.failure}", "", "", *more)
    speed = done.samples_per_second
    if usd_per_hour:
        more = (f"{usd_per_hour * trial.nodes / 3600 * 1e6 / speed:.2f}",)
    return (*known, f"{speed:.1f}", f"{done.step_s * 1e3:.0f} ms", f"{share:.0%}", *more)


def as_rows(study: PlacementStudy) -> Mapping[str, Any]:
    """Return the study for ``--json``."""
    return {
        "trials": [
            {**asdict(trial), **asdict(done), "efficiency": study.efficiency(trial)}
            for trial, done in study.results.items()
        ],
        "best": asdict(study.best),
        "kept": asdict(study.kept) if study.kept else None,
    }
