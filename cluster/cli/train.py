"""``spr-cluster train``."""

from __future__ import annotations

import argparse
import json
import sys
import time
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
from jobs.spec import FABRICS, PLACEMENTS, PlacementWish, new_job_id
from jobs.squad.options import DEMO, TrainOptions, add_arguments, from_namespace

if TYPE_CHECKING:
    from cluster.cli.display import PlainProgress, TreeProgress

_EXAMPLES = """\
  spr-cluster train squad                                     DistilBERT on SQuAD, from the hub
  spr-cluster train squad --data train.json --eval dev.json --model ./my-encoder
  spr-cluster train squad --demo                              a small new model on a small sample
"""


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
    _add_placement(parser.add_argument_group("placement"))
    parser.add_argument(
        "--results", metavar="DIR", help="local folder for the results (default: results/JOB)"
    )
    add_push_option(parser)
    parser.add_argument(
        "--demo", action="store_true", help="train a small new model on the sample that we ship"
    )
    add_arguments(parser.add_argument_group("training"), without={"output", "trial_seconds"})
    parser.set_defaults(run=run)


def _add_placement(group: argparse._ArgumentGroup) -> None:
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
    from jobs.request import check_request
    from jobs.train import train
    from provision.stacks import load_stack

    now = datetime.now(timezone.utc)
    request = build_request(args, now)
    check_request(request)
    opened = open_place(args)
    progress = make_progress()
    ctx = open_context(args, open_chosen_cloud(args), progress=progress)
    cluster = find_cluster(ctx.clients.ec2, args.name)
    show = JobDisplay(progress)
    result = train(
        cluster,
        load_stack(cluster.stack),
        ctx.host_opener(),
        request,
        progress=progress,
        now=now,
        on_event=show.event,
        on_log=show.log,
    )
    pushed = push(opened, request.results, new_job_id("squad", now), progress)
    if args.json:
        print(json.dumps({**result, "pushed_to": pushed} if pushed else result))
    else:
        print(render_result(result, request.results) + (f"\n{pushed}" if pushed else ""))
    return 0


def build_request(args: argparse.Namespace, now: datetime) -> Any:
    """The options as a request; raises :class:`UsageError` for one that is out of its range."""
    from infra.errors import UsageError
    from jobs.request import TrainRequest, expand_home

    for flag, value in {"--ppn": args.ppn, "--ccl-workers": args.ccl_workers}.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: expected a whole number from 1 on")
    base = DEMO if args.demo else TrainOptions()
    if args.demo and "dataset" in args:
        base = replace(base, data=None)
    for key in ("data", "eval", "results"):
        if getattr(args, key, None):
            setattr(args, key, str(expand_home(getattr(args, key))))
    try:
        options = from_namespace(args, base)
    except ValueError as error:
        raise UsageError(str(error)) from None
    results = Path(args.results or Path("results", new_job_id("squad", now)))
    wish = PlacementWish(args.placement, args.ppn, args.ccl_workers, args.fabric)
    return TrainRequest(options, results, wish, left_open(args))


def left_open(args: argparse.Namespace) -> frozenset[str]:
    """What `tune` may decide, as the user said nothing of it."""
    if args.no_tuned or args.placement != "auto":
        return frozenset()
    batch_size = set() if "batch_size" in args else {"batch_size"}
    placement = set() if args.ppn or args.ccl_workers else {"placement"}
    return frozenset(batch_size | placement)


class JobDisplay:
    """A job's events as a progress bar, its other output as it comes."""

    def __init__(self, progress: PlainProgress | TreeProgress) -> None:
        self._progress = progress
        self._told: tuple[float, float] | None = None

    def log(self, line: str) -> None:
        console = getattr(self._progress, "console", None)
        if console is None:
            print(line, file=sys.stderr, flush=True)
        else:
            console.print(line, markup=False, highlight=False)

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of the job."""
        kind = event["event"]
        if kind == "start":
            hosts = ", ".join(event["hosts"])
            self.log(
                f"{event['world_size']} ranks on {hosts}; backend {event['backend']}, {event['dtype']}"
            )
        elif kind == "phase":
            self._progress.note(event["name"])
        elif kind == "note":
            self.log(event["text"])
        elif kind == "step":
            self._step(event)

    def _step(self, event: dict[str, Any]) -> None:
        done, total = event["step"], event["total"]
        width = 30
        filled = width * done // total
        text = (
            f"{'█' * filled}{'░' * (width - filled)} step {done}/{total}  epoch {event['epoch']:.2f}  "
            f"loss {event['loss']:.3f}  {event['samples_per_second']:.1f} samples/s"
        )
        if hasattr(self._progress, "console") or self._is_due(done / total):
            self._progress.note(text)

    def _is_due(self, share: float) -> bool:
        """Where every note is a line of its own: one per twentieth of the work, or ten seconds."""
        now = time.monotonic()
        if (
            share < 1
            and self._told is not None
            and share < self._told[0] + 0.05
            and now < self._told[1] + 10
        ):
            return False
        self._told = (share, now)
        return True


def render_result(result: dict[str, Any], folder: Path) -> str:
    """The result in a few lines."""
    hosts = sorted({rank["hostname"] for rank in result["ranks"]})
    return (
        f"F1 {result['f1']:.1f}, exact match {result['em']:.1f} on {result['eval_questions']} questions\n"
        f"world size {result['world_size']} on {len(hosts)} hosts ({', '.join(hosts)}), "
        f"backend {result['backend']}, {result['dtype']}\n"
        f"{result['samples_per_second']:.1f} samples/s, {result['seconds']['train']:.1f} s of training\n"
        f"model, predictions and results.json: {folder}/"
    )
