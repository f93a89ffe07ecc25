"""``tune --scaling``: trials of one training job on increasing numbers of nodes, and predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.words import counted
from jobs.experiments.step_model import (
    SQUAD_FEATURES,
    StepModelFit,
    StepTiming,
    fit_step_model,
    published_speedups,
)
from jobs.experiments.tune import TrialResult, TrialSeries, all_failed, open_trials
from jobs.places.files import save_on_head
from jobs.places.queue.session import JobContext, JobSession
from jobs.train.request import TrainRequest, require_able_stack
from jobs.worker.spec import PlacementOptions
from provision.host import Host

FOLDER = "spr-scaling"
"""In the login user's home on the head: one file per study, named by timestamp."""
FILE = "scaling.json"
_MIN_COMPUTING_SHARE = 0.1


@dataclass(frozen=True)
class ScalingRequest:
    """``nodes`` is in ascending order. ``weak`` keeps the batch per rank; otherwise the global batch is kept.

    ``predict`` lists the numbers of nodes to predict.
    """

    training: TrainRequest
    nodes: tuple[int, ...]
    weak: bool
    seconds: int
    predict: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScalingRow:
    """One number of nodes, measured or (``predicted``) computed. ``batch_size`` is per rank.

    ``efficiency`` is the share of ideal speed, relative to the fewest nodes measured. ``epoch_s`` and
    ``epoch_usd`` are for SQuAD's samples; ``epoch_usd`` is ``None`` if free or unknown.
    """

    nodes: int
    batch_size: float
    ranks: int | None = None
    samples_per_second: float | None = None
    step_s: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    epoch_s: float | None = None
    epoch_usd: float | None = None
    predicted: bool = False
    failure: str = ""


@dataclass(frozen=True)
class ScalingStudy:
    """The results; ``fit`` is ``None`` if too little was measured."""

    when: str
    cluster: str
    stack: str
    model: str
    weak: bool
    samples: int
    instance_type: str
    rows: tuple[ScalingRow, ...]
    fit: StepModelFit | None
    price_source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the study for ``--json`` and the files; ``runs`` are the measured rows that succeeded."""
        runs = [asdict(row) for row in self.rows if not row.predicted and not row.failure]
        return {
            **asdict(self),
            "published_speedup": {str(n): round(s, 3) for n, s in published_speedups().items()},
            "runs": [{**run, "name": "weak" if self.weak else "strong"} for run in runs],
        }


def batch_per_rank(batch_size: int, fewest: int, nodes: int, *, weak: bool) -> int:
    """Return the batch of each rank on ``nodes`` nodes; ``batch_size`` is that on the fewest.

    Raises :class:`UsageError` if the global batch can't be divided evenly.
    """
    if weak:
        return batch_size
    share, rest = divmod(batch_size * fewest, nodes)
    if rest or not share:
        raise UsageError(
            f"--batch-size {batch_size}: the batch of {counted(fewest, 'node')} can't "
            f"be divided evenly among {nodes}",
            hint="use a multiple of the numbers of nodes, or --weak, which keeps the batch of each rank",
        )
    return share


def scaling(context: JobContext, request: ScalingRequest) -> ScalingStudy:
    """Run a trial on each number of nodes; keep the study on the head and in the results folder.

    Raises :class:`JobError` if none succeeds. Ctrl-C stops the current trial.
    """
    require_able_stack(context.stack, f"scaling {request.training.options.task}")
    training = request.training
    training = training.change(training.options, training.placement, request.nodes[-1])
    series = open_trials(context, "scaling", training, request.seconds, lambda _: None)
    placement = _same_everywhere(series.session, training)
    measured = [_measure(series, request, placement, nodes) for nodes in request.nodes]
    if all(done.failure for _, done in measured):
        raise all_failed(series.session, [done.failure for _, done in measured])
    study = make_study(context, request, measured)
    save_study(series.session.head, study, training.results, context.now)
    return study


def _same_everywhere(session: JobSession, training: TrainRequest) -> PlacementOptions:
    """Return one placement for all nodes, the same in every trial."""
    backend = session.context.stack.choose_backend(training.options.backend)
    layout = session.plan_placement(training.placement, backend)
    if training.placement.mode == "reference":
        return training.placement
    return replace(training.placement, nproc_per_node=layout.nproc_per_node)


def _measure(
    series: TrialSeries, request: ScalingRequest, placement: PlacementOptions, nodes: int
) -> tuple[ScalingRow, TrialResult]:
    options = request.training.options
    batch = batch_per_rank(options.batch_size, request.nodes[0], nodes, weak=request.weak)
    title = f"{counted(nodes, 'node')}, batch {batch} per rank"
    done = series.run(replace(options, batch_size=batch), placement, title, nodes)
    ranks = nodes * done.nproc_per_node if done.nproc_per_node else None
    row = ScalingRow(
        nodes, batch, ranks, done.samples_per_second, done.step_s, failure=done.failure
    )
    return row, done


def make_study(
    context: JobContext, request: ScalingRequest, measured: Sequence[tuple[ScalingRow, TrialResult]]
) -> ScalingStudy:
    """Return efficiencies, the fitted model, and its predictions. Pure."""
    options = request.training.options
    ppn = next(done.nproc_per_node for _, done in measured if not done.failure) or 1
    cluster = context.cluster
    rows = [row for row, _ in measured]
    gradients = max(done.gradient_bytes for _, done in measured)
    by_node = context.stack.choose_backend(options.backend) == "gloo"
    found = fit_rows(rows, gradients, ppn, by_node=by_node)
    if found:
        rows += [_predict(found, request, ppn, nodes) for nodes in request.predict]
    return ScalingStudy(
        when=context.now.isoformat(timespec="seconds"),
        cluster=cluster.name,
        stack=context.stack.name,
        model=options.model_name or options.task,
        weak=request.weak,
        samples=SQUAD_FEATURES,
        instance_type=cluster.head.instance.instance_type,
        rows=_compare(rows, context.cloud.usd_per_hour),
        fit=found,
        price_source=context.cloud.price_source,
    )


def fit_rows(
    rows: Sequence[ScalingRow],
    gradient_bytes: int,
    ppn: int,
    *,
    by_node: bool,
) -> StepModelFit | None:
    """Fit the model of the step time.

    Returns ``None`` for fewer than two numbers of nodes, and if the fit leaves almost no computing in
    the steps on the fewest nodes: such a model can't predict fewer nodes.
    """
    points = [
        StepTiming(row.nodes, row.batch_size * ppn, row.step_s)
        for row in rows
        if row.step_s is not None
    ]
    if len({point.nodes for point in points}) < 2:
        return None
    found = fit_step_model(points, gradient_bytes, ppn, by_node=by_node)
    fewest = min(points, key=lambda point: point.nodes)
    computing = found.model.compute_s(fewest.node_batch) / fewest.step_s
    return found if computing >= _MIN_COMPUTING_SHARE else None


def _predict(found: StepModelFit, request: ScalingRequest, ppn: int, nodes: int) -> ScalingRow:
    """Predict the row for a number of nodes; a rank's batch may be fractional."""
    batch: float = request.training.options.batch_size
    batch = batch if request.weak else batch * request.nodes[0] / nodes
    node_batch = batch * ppn
    model = found.model
    return ScalingRow(
        nodes,
        batch,
        nodes * ppn,
        model.samples_per_second(nodes, node_batch),
        model.step_s(nodes, node_batch),
        predicted=True,
    )


def _compare(rows: Sequence[ScalingRow], price: float | None) -> tuple[ScalingRow, ...]:
    base = next(row for row in rows if row.samples_per_second)
    compared = []
    for row in rows:
        speed = row.samples_per_second
        if not speed or not base.samples_per_second:
            compared.append(row)
            continue
        speedup, seconds = speed / base.samples_per_second, SQUAD_FEATURES / speed
        compared.append(
            replace(
                row,
                speedup=speedup,
                efficiency=speedup * base.nodes / row.nodes,
                epoch_s=seconds,
                epoch_usd=None if price is None else price * row.nodes * seconds / 3600,
            )
        )
    return tuple(compared)


def save_study(head: Host, study: ScalingStudy, results: Path, now: datetime) -> None:
    """Save the study on the cluster's head and in the results folder."""
    text = json.dumps(study.as_dict(), indent=1) + "\n"
    results.mkdir(parents=True, exist_ok=True)
    (results / FILE).write_text(text)
    save_on_head(head, FOLDER, text, now)
