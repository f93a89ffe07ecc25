"""``spr-cluster train``."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.common import (
    SubParsers,
    add_cluster_options,
    add_command,
    open_chosen_cloud,
    open_context,
)
from cluster.cli.fetch import add_push_option, open_place, push
from cluster.cli.job_display import JobDisplay, render_result
from cluster.cli.train_requests import LAST, build_reference, build_request, build_resume
from jobs.spec import FABRICS, PLACEMENTS
from jobs.squad.options import add_arguments

if TYPE_CHECKING:
    from cluster.nodes import Cluster, HostOpener
    from infra.progress import Progress
    from jobs.reference import ReferenceRequest
    from jobs.request import TrainRequest
    from jobs.resume import ResumeRequest
    from provision.stacks import Stack

    Wish = TrainRequest | ReferenceRequest | ResumeRequest

_NOT_HERE = {"output", "trial_seconds", "resume"}
_EXAMPLES = """\
  spr-cluster train squad                                     DistilBERT on SQuAD, from the hub
  spr-cluster train squad --data train.json --eval dev.json --model ./my-encoder
  spr-cluster train squad --demo                              a small new model on a small sample
  spr-cluster train squad --resume                            go on with the last unfinished job
  spr-cluster train squad --recipe reference --smoke          the published recipe, for a minute
"""
_RECIPES = ("fast", "reference")
# The names of jobs.presets, whose import would make the help slow; a test compares them.
_PRESETS = ("distilbert", "bert-large")


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        "train over all nodes",
        "Train question answering with PyTorch DDP over all nodes of a cluster, evaluate it with\n"
        "SQuAD's exact match and F1, and bring model and results home.",
        _EXAMPLES,
    )
    parser.add_argument("job", choices=("squad",), help="what to train")
    add_cluster_options(parser)
    _add_recipe(parser.add_argument_group("recipe"))
    _add_placement(parser.add_argument_group("placement"))
    parser.add_argument(
        "--results", metavar="DIR", help="local folder for the results (default: results/JOB)"
    )
    add_push_option(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=LAST,
        default=argparse.SUPPRESS,
        metavar="JOB",
        help="go on with an interrupted job from its last checkpoint, with its own options "
        "(default: the last unfinished one)",
    )
    parser.add_argument(
        "--demo", action="store_true", help="train a small new model on the sample that we ship"
    )
    add_arguments(parser.add_argument_group("training"), without=_NOT_HERE)
    parser.set_defaults(run=run)


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recipe",
        choices=_RECIPES,
        default="fast",
        help="fast: ours; reference: transformers' own run_qa.py with the published flags and "
        "placement, which leave nothing else to choose (default: fast)",
    )
    group.add_argument(
        "--preset",
        choices=_PRESETS,
        help="model, batch, learning rate and epochs as published (recipe reference: distilbert)",
    )
    group.add_argument(
        "--smoke",
        action="store_true",
        help="recipe reference: on one node for a minute, to see that all it needs is there",
    )
    group.add_argument(
        "--run-qa",
        metavar="DIR",
        help="recipe reference: the folder of run_qa.py here (default: the stack's, on the nodes)",
    )


def _add_placement(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nodes", type=int, metavar="N", help="use the first N nodes (default: all)"
    )
    group.add_argument(
        "--ppn",
        type=int,
        help="ranks per node (default: what `tune` has found, else one per NUMA node)",
    )
    group.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="auto",
        help="auto: each rank on cores of its own; reference: the published recipe's numbers, "
        "which start more threads than there are cores (default: auto)",
    )
    group.add_argument(
        "--ccl-workers",
        type=int,
        metavar="N",
        help="oneCCL's own cores per rank, taken off the computing ones (default: 1)",
    )
    group.add_argument(
        "--no-tuned", action="store_true", help="leave out what `spr-cluster tune` has found"
    )
    group.add_argument(
        "--fabric",
        choices=FABRICS,
        default="tcp",
        help="how oneCCL reaches other nodes; efa where the nodes have it (default: tcp)",
    )


def run(args: argparse.Namespace) -> int:
    from cluster.cli.display import make_progress
    from cluster.nodes import find_cluster
    from jobs.record import Where, read_job_id
    from provision.stacks import load_stack

    now = datetime.now(timezone.utc)
    wish = _build_wish(args, now)
    opened = open_place(args)
    progress = make_progress()
    cloud = open_chosen_cloud(args)
    ctx = open_context(args, cloud, progress=progress)
    cluster = find_cluster(ctx.clients.ec2, args.name)
    wish = replace(wish, where=Where(cloud.name, cloud.region, cloud.billed))
    stack, opener = load_stack(cluster.stack, locked=False), ctx.host_opener()
    show = JobDisplay(progress, lambda: usd_so_far(cluster, billed=cloud.billed))
    result, folder = _train(cluster, stack, opener, wish, progress, show, now)
    if not args.json:
        print(render_result(result, folder), flush=True)
    pushed = push(opened, folder, read_job_id(folder), progress)
    if args.json:
        print(json.dumps({**result, "pushed_to": pushed} if pushed else result))
    elif pushed:
        print(pushed)
    return 0


def _build_wish(args: argparse.Namespace, now: datetime) -> Wish:
    """What to do, checked as far as it can be here; raises :class:`UsageError`."""
    from jobs.request import check_request, check_results

    if "resume" in args:
        return build_resume(args)
    if args.recipe == "reference":
        reference = build_reference(args, now)
        check_results(reference.results)
        return reference
    request = build_request(args, now)
    check_request(request)
    return request


def _train(
    cluster: Cluster,
    stack: Stack,
    opener: HostOpener,
    wish: Wish,
    progress: Progress,
    show: JobDisplay,
    now: datetime,
) -> tuple[dict[str, Any], Path]:
    """Start the job, or continue it; returns its results, and where they are here."""
    from jobs.reference import ReferenceRequest, train_reference
    from jobs.resume import ResumeRequest, resume
    from jobs.train import train

    how: Any = {"progress": progress, "on_event": show.event, "on_log": show.log}
    if isinstance(wish, ResumeRequest):
        return resume(cluster, stack, opener, wish, now=now, **how)
    if isinstance(wish, ReferenceRequest):
        return train_reference(cluster, stack, opener, wish, now=now, **how), wish.results
    return train(cluster, stack, opener, wish, now=now, **how), wish.results


def usd_so_far(cluster: Cluster, *, billed: bool) -> float:
    """What the cluster's nodes have cost since their launch, as `status` says it."""
    now = datetime.now(timezone.utc)
    return sum(node.instance.accrued_usd(now) for node in cluster.nodes) if billed else 0.0
