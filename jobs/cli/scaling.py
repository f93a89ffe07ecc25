"""``spr-cluster scaling``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.common import add_cluster_options
from cluster.cli.display import format_seconds, format_table
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from jobs.cli.context import open_job_context
from jobs.cli.train_requests import read_options
from jobs.cli.trial_options import (
    add_training_arguments,
    add_trial_arguments,
    check_seconds,
    numbers,
)
from jobs.experiments.published import SQUAD_FEATURES, published_speedups
from jobs.experiments.scaling import (
    ScalingRequest,
    ScalingRow,
    ScalingStudy,
    batch_per_rank,
    scaling,
)
from jobs.experiments.step_model import StepModel
from jobs.launch.plan import PlacementOptions, new_job_id
from jobs.train.request import TrainRequest, check_inputs, check_results, expand_home

_EXAMPLES = """\
  spr-cluster scaling squad --nodes 1,2,4 --predict 8,16
  spr-cluster scaling squad --weak --batch-size 32 --data train.json --model ./my-encoder
"""
_MOST_NODES = 256
_NO_NETWORK_GBIT_S = 3200
"""More than any machine's: a fitted speed beyond it is that of no exchange."""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "scaling",
        "Run a short trial of a training job on the first 1, 2, 4… nodes of the cluster, compare its\n"
        "speed with ideal and with the published figures, and fit a model of the step time, which\n"
        "predicts other numbers of nodes. Strong scaling by default: the batch of all ranks together\n"
        "stays as it is on the fewest nodes; --weak keeps the batch of each rank.",
        _EXAMPLES,
    )
    parser.add_argument("job", choices=("squad",), help="what will be trained")
    add_cluster_options(parser)
    study = parser.add_argument_group("study")
    add = study.add_argument
    add("--nodes", type=numbers, metavar="LIST", help="(default: 1, 2, 4… and all)")
    add("--weak", action="store_true", help="keep the batch of each rank, not that of all")
    add("--predict", type=numbers, default=(), metavar="LIST", help="nodes that are not there")
    add_trial_arguments(add)
    add("--samples", type=int, help="that make an epoch (default: SQuAD's 88500)")
    add(
        "--flow-gbit-s",
        type=float,
        metavar="X",
        help="one flow's speed between two nodes: the model then tells how much of the exchange "
        "overlaps (default: it tells the speed that it comes to)",
    )
    add("--ppn", type=int, help="ranks per node (default: one per NUMA node)")
    add("--ccl-workers", type=int, metavar="N", help="with oneCCL (default: 1)")
    add("--results", metavar="DIR", help="local folder for scaling.json (default: results/STUDY)")
    add_training_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    now = datetime.now(timezone.utc)
    request = build_request(args, now)
    check_inputs(request.training.options)
    check_results(request.training.results)
    context = open_job_context(args, now)
    study = scaling(context, choose_nodes(request, len(context.cluster.nodes)))
    folder = request.training.results
    print(json.dumps(study.as_dict()) if args.json else "\n".join(render(study, folder)))
    return 0


def build_request(args: argparse.Namespace, now: datetime) -> ScalingRequest:
    """The options as a request; raises :class:`UsageError` for one that is out of its range."""

    _check(args)
    options = read_options(args)
    results = expand_home(args.results or str(Path("results", new_job_id("scaling", now))))
    wish = PlacementOptions("auto", args.ppn, args.ccl_workers, args.fabric)
    request = ScalingRequest(
        TrainRequest(options, results, wish),
        nodes=tuple(sorted(args.nodes or ())),
        weak=args.weak,
        seconds=args.seconds,
        predict=tuple(sorted(args.predict)),
        samples=args.samples or SQUAD_FEATURES,
        flow_gbit_s=args.flow_gbit_s,
    )
    return _checked_batches(request) if request.nodes else request


def _check(args: argparse.Namespace) -> None:

    check_seconds(args.seconds)
    for flag in ("ppn", "ccl_workers", "samples"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} {value}: expected a whole number from 1 on")
    for flag in ("nodes", "predict"):
        for value in getattr(args, flag) or ():
            if value > _MOST_NODES:
                raise UsageError(f"--{flag} {value} is out of range: 1 to {_MOST_NODES}")
    speed = args.flow_gbit_s
    if speed is not None and not (0 < speed < math.inf):
        raise UsageError(f"--flow-gbit-s {speed:g} is out of range: more than 0")


def choose_nodes(request: ScalingRequest, there: int) -> ScalingRequest:
    """1, 2, 4… and all nodes that are there, where the user named none."""
    if request.nodes:
        return request
    powers = [2**power for power in range(there.bit_length()) if 2**power < there]
    return _checked_batches(replace(request, nodes=(*powers, there)))


def _checked_batches(request: ScalingRequest) -> ScalingRequest:
    """A batch that can't be shared must not be found out after the first trials."""

    size = request.training.options.batch_size
    for nodes in request.nodes:
        batch_per_rank(size, request.nodes[0], nodes, weak=request.weak)
    return request


def render(study: ScalingStudy, folder: Path) -> Iterator[str]:
    """The study as a table, and what the model says."""

    # Those are against one node, too.
    from_one = any(row.nodes == 1 and row.samples_per_second for row in study.rows)
    published = published_speedups() if from_one else {}
    kind = "weak: the batch of each rank stays" if study.weak else "strong: the whole batch stays"
    yield f"Scaling of {study.model} on {study.instance_type}, stack {study.stack}; {kind}"
    header = ("nodes", "batch", "samples/s", "step", "times as fast", "of ideal", "published")
    yield format_table(
        [(*header, "epoch", "cost"), *(_cells(row, published) for row in study.rows)]
    )
    yield f"An epoch has {study.samples} samples. Published: DistilBERT on r7iz.metal-16xl, an epoch of"
    yield "SQuAD in 26 min on 1 node and 7 min 30 on 4. Rows with * are computed by the model."
    yield from _tell_model(study)
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


def _tell_model(study: ScalingStudy) -> Iterator[str]:
    if study.fit is None:
        measured = {row.nodes for row in study.rows if row.step_s is not None}
        why = (
            "the exchange alone would explain these steps; measure one node, too"
            if len(measured) > 1
            else "that takes measurements on two numbers of nodes"
        )
        yield f"No model of the step time: {why}."
        return
    model = study.fit.model
    yield (
        f"Model of the step time: {model.sample_s * 1e3:.2f} ms per sample and node"
        + (f" + {model.fixed_s * 1e3:.1f} ms per step" if model.fixed_s else "")
        + f"; {_tell_exchange(model)}."
    )
    told = f"It misses the measured steps by up to {study.fit.worst:.1%}"
    few = (
        f", with {len(study.fit.parameters)} parameters for {len(study.fit.errors)} measurements: "
        "little is proved by that, measure more sizes"
    )
    yield told + ("" if study.fit.is_tested else few) + "."


def _tell_exchange(model: StepModel) -> str:
    gbit_s = model.bytes_per_second * 8e-9
    if gbit_s > _NO_NETWORK_GBIT_S:
        return "nothing of the steps shows that gradients are exchanged"
    return (
        f"gradients of {model.gradient_bytes / 1e6:.0f} MB per step and rank go round a ring at "
        f"{gbit_s:.2f} Gbit/s, {model.overlap:.0%} of it beside the backward pass"
    )
