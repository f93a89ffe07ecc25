"""``spr-cluster run``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.common import (
    SubParsers,
    add_cluster_options,
    add_command,
    open_chosen_cloud,
    open_context,
)
from jobs.spec import FABRICS, PLACEMENTS, PlacementWish, new_job_id

if TYPE_CHECKING:
    from jobs.record import JobRecord
    from jobs.run import RunRequest

_EXAMPLES = """\
  spr-cluster run -- hostname                                 once per rank
  spr-cluster run --nodes 2 --ppn 2 -- python my_script.py --epochs 3
  spr-cluster run --files src --files data.csv --env SEED=7 -- python src/main.py
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "run",
        "run any program over the nodes",
        "Run a program in every rank, placed and pinned as `train` does it. The command's script is\n"
        "copied to the nodes from the working folder, and what --files names. Every rank finds torch's\n"
        "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; what it writes into the folder\n"
        "$SPR_OUTPUT comes home, that of other nodes than the first in folders of their names.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    add_placement_options(parser.add_argument_group("placement"))
    add = parser.add_argument_group("program").add_argument
    add(
        "--files",
        action="append",
        default=[],
        metavar="PATH",
        help="a file or folder that the program needs, beside its script; may be given again",
    )
    add("--large-files", action="store_true", help="send more than 256 MiB")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for the program; may be given again",
    )
    add("--results", metavar="DIR", help="local folder for its output (default: results/JOB)")
    parser.add_argument(
        "program", nargs="+", metavar="PROGRAM", help="after --: the program and its arguments"
    )
    parser.set_defaults(run=run)


def add_placement_options(group: argparse._ArgumentGroup) -> None:
    """``--nodes``, ``--ppn``, ``--placement``, ``--ccl-workers``, ``--backend``, ``--fabric``."""
    add = group.add_argument
    add("--nodes", type=int, metavar="N", help="use the first N nodes (default: all)")
    add("--ppn", type=int, help="ranks per node (default: one per NUMA node)")
    add(
        "--placement",
        choices=PLACEMENTS,
        default="auto",
        help="auto: each rank on cores of its own; reference: the published recipe's numbers "
        "(default: auto)",
    )
    add("--ccl-workers", type=int, metavar="N", help="oneCCL's own cores per rank (default: 1)")
    add(
        "--backend",
        choices=("auto", "ccl", "gloo"),
        default="auto",
        help="what the ranks will talk over: ccl has cores of its own (default: the stack's)",
    )
    add("--fabric", choices=FABRICS, default="tcp", help="as for train (default: tcp)")


def run(args: argparse.Namespace) -> int:
    from cluster.cli.display import make_progress
    from cluster.cli.job_display import JobDisplay
    from cluster.nodes import find_cluster
    from jobs.record import Where
    from jobs.request import check_results
    from jobs.run import run as run_program
    from provision.stacks import load_stack

    now = datetime.now(timezone.utc)
    request = build_request(args, now)
    check_results(request.results)
    progress = make_progress()
    cloud = open_chosen_cloud(args)
    ctx = open_context(args, cloud, progress=progress)
    cluster = find_cluster(ctx.clients.ec2, args.name)
    show = JobDisplay(progress)
    done = run_program(
        cluster,
        load_stack(cluster.stack, locked=False),
        ctx.host_opener(),
        replace(request, where=Where(cloud.name, cloud.region, cloud.billed)),
        progress=progress,
        now=now,
        on_event=show.event,
        on_log=show.log,
    )
    print(json.dumps(asdict(done)) if args.json else render(done, request.results))
    return 0


def build_request(args: argparse.Namespace, now: datetime) -> RunRequest:
    """The options as a request; raises :class:`UsageError` for what can't be."""
    from infra.errors import UsageError
    from jobs.request import expand_home
    from jobs.run import RunRequest, check_variables
    from jobs.workfiles import collect_files

    for flag in ("nodes", "ppn", "ccl_workers"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UsageError(
                f"--{flag.replace('_', '-')} {value}: expected a whole number from 1 on"
            )
    for flag in ("program", "files"):
        if "" in getattr(args, flag):
            raise UsageError(f"{flag if flag == 'program' else '--files'}: a word is empty")
    variables = check_variables(args.env)
    files = collect_files(args.program, args.files, Path.cwd(), large=args.large_files)
    results = expand_home(args.results) if args.results else Path("results", new_job_id("run", now))
    return RunRequest(
        command=tuple(args.program),
        files=files,
        results=results,
        placement=PlacementWish(args.placement, args.ppn, args.ccl_workers, args.fabric),
        nodes=args.nodes,
        env=variables,
        backend=args.backend,
    )


def render(done: JobRecord, folder: Path) -> str:
    """The result in a few lines."""
    from cluster.cli.display import format_seconds

    ppn = int(done.placement["nproc_per_node"])
    nodes = len(done.nodes)
    return (
        f"{nodes * ppn} ranks on {nodes} nodes, {format_seconds(done.seconds or 0.0)}\n"
        f"output, log and job.json: {folder}/"
    )
