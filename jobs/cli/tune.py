"""``spr-cluster tune``: short trials of a training job, of placements or of numbers of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.console.display import format_seconds, format_table
from cluster.console.options import option, switch
from cluster.console.output import emit
from cluster.console.parser import Parser, add_command
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.shared.chosen_job import open_job_context
from jobs.cli.shared.job_options import (
    WITHOUT_EFFECT,
    TrialRequest,
    add_tasks,
    change_options,
    numbers,
)
from jobs.experiments.scaling import (
    ScalingRequest,
    ScalingRow,
    ScalingStudy,
    batch_per_rank,
    scaling,
)
from jobs.experiments.step_model import StepModel, published_speedups
from jobs.experiments.tune import (
    Trial,
    TrialGrid,
    TrialResult,
    TuneRequest,
    as_row,
    estimate_minutes,
    tune,
)
from jobs.places.plan import new_job_id
from jobs.train.request import TrainRequest, check_inputs, check_results, spec_of
from jobs.train.tuned import TuningResult
from jobs.worker.spec import PlacementOptions, Resources

_TUNE_EXAMPLES = """\
  spr-cluster tune {task}
  spr-cluster tune {task} --ppn 1,2,4 --ccl-workers 1,2,4 --seconds 30
  spr-cluster tune {task} --batch-size 8,16,32      also compare batch sizes
  spr-cluster tune {task} --scaling --nodes 1,2,4 --predict 8,16
  spr-cluster tune {task} --scaling --weak --batch-size 32
"""

_ABOUT_TUNE = (
    "Find the fastest placement of a training job: run short trials with different numbers of\n"
    "ranks per node and oneCCL workers. The head keeps the result, and `train` uses it unless\n"
    "you set --ppn or --ccl-workers. The batch size per rank varies only if --batch-size lists\n"
    "several, because it changes what the job learns.\n"
    "\n"
    "With --scaling, measure how the job scales: run a trial on the first 1, 2, 4… nodes, compare\n"
    "the speed with ideal and published speedups, and fit a model of the step time that predicts\n"
    "other numbers of nodes. The global batch stays as on the fewest nodes (strong scaling)."
)
_MAX_NODES = 256
_NOT_COMPILED = (
    "Trials compile no layers, except with --compile on; long runs in bf16 do and are faster."
)
_NO_NETWORK_GBIT_S = 3200
"""Above any machine's speed: a faster fitted flow means that the exchange is not measurable."""
_TRIALS: dict[str, Any] = {"parse": numbers, "metavar": "LIST", "section": "trials"}
_STUDY: dict[str, Any] = {"section": "study", "needs": "--scaling"}


@dataclass(frozen=True, kw_only=True)
class TuneCommand(TrialRequest):
    """The options of `tune`."""

    ppn: tuple[int, ...] | None = option(
        "ranks per node (default: what suits the nodes)", **_TRIALS
    )
    ccl_workers: tuple[int, ...] | None = option(
        "oneCCL workers per rank (default: 1,2)", **_TRIALS
    )
    batch_sizes: tuple[int, ...] | None = option(
        "features per rank", flags=("--batch-size",), **_TRIALS
    )
    scaling: bool = switch(
        "compare numbers of nodes, with one placement and batch size", section="study"
    )
    nodes: tuple[int, ...] = option(
        "numbers of nodes (default: 1, 2, 4… and all)", (), parse=numbers, metavar="LIST", **_STUDY
    )
    weak: bool = switch("keep the batch of each rank, not the global batch", **_STUDY)
    predict: tuple[int, ...] = option(
        "also predict these numbers of nodes", (), parse=numbers, metavar="LIST", **_STUDY
    )


def add_parser(parent: Parser) -> None:
    parser = add_command(parent, "tune", _ABOUT_TUNE, _TUNE_EXAMPLES.replace("{task}", "squad"))
    without = WITHOUT_EFFECT | {"batch_size", "seed", "token_cache"}
    add_tasks(parser, _ABOUT_TUNE, _TUNE_EXAMPLES, run_tune, TuneCommand, without)


def run_tune(request: TuneCommand) -> int:
    if request.scaling:
        return run_scaling(request)
    wanted = build_tune_request(request)
    check_inputs(wanted.training.options)
    context = open_job_context(request, datetime.now(timezone.utc))
    best, results = tune(
        context,
        wanted,
        on_plan=lambda trials: context.on_log(describe_trials(len(trials), request.seconds)),
    )
    rows = [as_row(*each) for each in results.items()]
    emit(request, lambda: render_tune(best, results), {"best": asdict(best), "trials": rows})
    return 0


def build_tune_request(request: TuneCommand) -> TuneRequest:
    """Return the options as a request. Raises :class:`UsageError` for one out of range."""
    request.check_seconds()
    options = request.read_options()
    batch_sizes = request.batch_sizes or (options.batch_size,)
    for size in batch_sizes:
        change_options(options, {"batch_size": size})
    grid = TrialGrid(request.ppn, request.ccl_workers, batch_sizes)
    training = TrainRequest(spec_of(options), Path("results"), env=request.read_variables())
    return TuneRequest(training, grid, request.seconds)


def describe_trials(trials: int, seconds: int) -> str:
    """Describe in one line the number of trials and their approximate duration."""
    about = format_seconds(60 * estimate_minutes(trials, seconds))
    return f"{counted(trials, 'trial')} of {seconds} s each: about {about} including start-up"


def render_tune(best: TuningResult, results: Mapping[Trial, TrialResult]) -> str:
    """Render the trials as a table, fastest first, and the saved result."""
    ranked = sorted(results.items(), key=lambda each: -(each[1].samples_per_second or 0))
    header = ("ppn", "workers", "threads", "batch", "samples/s")
    lines = [format_table([header, *(_tune_row(*each) for each in ranked)])]
    kept = [f"--ppn {best.nproc_per_node}"]
    kept += [f"--ccl-workers {best.ccl_workers}"] if best.ccl_workers else []
    kept += [f"--batch-size {best.batch_size}"] if best.batch_size else []
    lines.append(
        f"Kept on the head for {best.key.model} on stack {best.key.stack}: {' '.join(kept)}. "
        "`train` uses it unless you set these options."
    )
    lines.append(_NOT_COMPILED)
    if len(results) == 1:
        lines.append("Only one trial ran; --ppn 1,2 compares two.")
    return "\n".join(lines)


def _tune_row(trial: Trial, result: TrialResult) -> Sequence[str]:
    speed = result.samples_per_second
    return (
        str(trial.nproc_per_node),
        str(trial.ccl_workers or "-"),
        str(result.threads or "-"),
        str(trial.batch_size),
        f"failed: {result.failure}" if speed is None else f"{speed:.1f}",
    )


def run_scaling(request: TuneCommand) -> int:
    now = datetime.now(timezone.utc)
    wanted = build_scaling_request(request, now)
    check_inputs(wanted.training.options)
    check_results(wanted.training.results)
    context = open_job_context(request, now)
    study = scaling(context, choose_nodes(wanted, len(context.cluster.nodes)))
    folder = wanted.training.results
    emit(request, lambda: "\n".join(render_scaling(study, folder)), study.as_dict())
    return 0


def build_scaling_request(request: TuneCommand, now: datetime) -> ScalingRequest:
    """Return the options as a request. Raises :class:`UsageError` for one out of range."""
    request.check_seconds()
    for name, given in {"nodes": request.nodes, "predict": request.predict}.items():
        for value in given:
            if value > _MAX_NODES:
                raise UsageError(f"--{name} {value} is out of range: 1 to {_MAX_NODES}")
    ppn = _one("--ppn", request.ppn)
    workers = _one("--ccl-workers", request.ccl_workers)
    size = _one("--batch-size", request.batch_sizes)
    options = change_options(request.read_options(), {"batch_size": size} if size else {})
    resources = Resources(placement=PlacementOptions("auto", ppn, workers))
    study = ScalingRequest(
        TrainRequest(
            spec_of(options, resources=resources),
            Path("results", new_job_id("scaling", now)),
            env=request.read_variables(),
        ),
        nodes=tuple(sorted(request.nodes)),
        weak=request.weak,
        seconds=request.seconds,
        predict=tuple(sorted(request.predict)),
    )
    return _checked_batches(study) if study.nodes else study


def _one(name: str, values: Sequence[int] | None) -> int | None:
    """Return the only value of an option that may have several. Raises :class:`UsageError`."""
    if values and len(values) > 1:
        raise UsageError(f"{name} {','.join(map(str, values))}: --scaling compares only nodes")
    return values[0] if values else None


def choose_nodes(request: ScalingRequest, there: int) -> ScalingRequest:
    """Use 1, 2, 4… and all nodes of the cluster if the user named none."""
    if request.nodes:
        return request
    powers = [2**power for power in range(there.bit_length()) if 2**power < there]
    return _checked_batches(replace(request, nodes=(*powers, there)))


def _checked_batches(request: ScalingRequest) -> ScalingRequest:
    """Reject a batch that can't be divided before the first trial."""
    size = request.training.options.batch_size
    for nodes in request.nodes:
        batch_per_rank(size, request.nodes[0], nodes, weak=request.weak)
    return request


def render_scaling(study: ScalingStudy, folder: Path) -> Iterator[str]:
    """Render the study as a table, and the fitted model."""
    # The published speedups are relative to one node.
    from_one = any(row.nodes == 1 and row.samples_per_second for row in study.rows)
    published = published_speedups() if from_one else {}
    kind = "weak: same batch per rank" if study.weak else "strong: same global batch"
    yield f"Scaling of {study.model} on {study.instance_type}, stack {study.stack} ({kind})"
    header = ("nodes", "batch", "samples/s", "step", "speedup", "of ideal", "published")
    yield format_table(
        [(*header, "epoch", "cost"), *(_cells(row, published) for row in study.rows)]
    )
    yield f"An epoch is SQuAD's {study.samples} samples. Published: DistilBERT on r7iz.metal-16xl, in"
    yield "26 min on 1 node and 7 min 30 s on 4. Rows with * are predicted by the model."
    yield _NOT_COMPILED
    if any(row.predicted for row in study.rows):
        yield "Predictions assume gradients in groups of 25 MiB; `train` sends 2.5 MiB (5 MiB in fp32)."
    if study.price_source:
        yield f"Cost on demand, machines alone: {study.price_source}."
    yield from _render_model(study)
    yield f"scaling.json: {folder}/, and ~/spr-scaling on the head"


def _cells(row: ScalingRow, published: dict[int, float]) -> tuple[str, ...]:
    name = f"{row.nodes}*" if row.predicted else str(row.nodes)
    seen = published.get(row.nodes)
    if row.samples_per_second is None or row.step_s is None:
        return (name, f"{row.batch_size:g}", f"failed: {row.failure}", *[""] * 6)
    return (
        name,
        f"{row.batch_size:g}",
        f"{row.samples_per_second:.1f}",
        f"{row.step_s * 1e3:.0f} ms",
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        f"{seen:.2f}" if seen else "-",
        format_seconds(row.epoch_s or 0.0),
        "-" if row.epoch_usd is None else f"${row.epoch_usd:.2f}",
    )


def _render_model(study: ScalingStudy) -> Iterator[str]:
    if study.fit is None:
        measured = {row.nodes for row in study.rows if row.step_s is not None}
        why = (
            "the exchange alone would explain these steps; also measure one node"
            if len(measured) > 1
            else "it needs measurements on two numbers of nodes"
        )
        yield f"No model of the step time: {why}."
        return
    model = study.fit.model
    yield (
        f"Model of the step time: {model.sample_s * 1e3:.2f} ms per sample and node"
        + (f" + {model.fixed_s * 1e3:.1f} ms per step" if model.fixed_s else "")
        + f"; {_render_exchange(model)}."
    )
    error = f"Largest error for a measured step: {study.fit.worst:.1%}"
    few = (
        f", but with {counted(len(study.fit.parameters), 'parameter')} for "
        f"{counted(len(study.fit.errors), 'measurement')} it proves little; measure more sizes"
    )
    yield error + ("" if study.fit.is_tested else few) + "."


def _render_exchange(model: StepModel) -> str:
    gbit_s = model.bytes_per_second * 8e-9
    if gbit_s > _NO_NETWORK_GBIT_S:
        return "the steps show no cost of exchanging gradients"
    return (
        f"{model.gradient_bytes / 1e6:.0f} MB of gradients per step and rank travel around a ring at "
        f"{gbit_s:.2f} Gbit/s"
    )
