"""``spr-cluster run``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.common import add_cluster_options
from cluster.cli.display import format_seconds
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from jobs.cli.context import open_job_context
from jobs.launch.plan import FABRICS, PLACEMENTS, PlacementOptions, new_job_id
from jobs.launch.record import JobRecord
from jobs.launch.session import run_job
from jobs.train.program import ProgramRequest, check_variables, plan_program
from jobs.train.program_files import collect_files
from jobs.train.request import check_results, expand_home

_EXAMPLES = """\
  spr-cluster run -- hostname                                 once per rank
  spr-cluster run --nodes 2 --ppn 2 -- python my_script.py --epochs 3
  spr-cluster run --files src --files data.csv --env SEED=7 -- python src/main.py
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "run",
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
    now = datetime.now(timezone.utc)
    request = build_request(args, now)
    check_results(request.results)
    context = open_job_context(args, now)
    plan = plan_program(request, context.stack)
    done = run_job(context, plan.kind, lambda _: plan).record
    print(json.dumps(asdict(done)) if args.json else render(done, request.results))
    return 0


def build_request(args: argparse.Namespace, now: datetime) -> ProgramRequest:
    """The options as a request; raises :class:`UsageError` for what can't be."""

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
    return ProgramRequest(
        command=tuple(args.program),
        files=files,
        results=results,
        placement=PlacementOptions(args.placement, args.ppn, args.ccl_workers, args.fabric),
        nodes=args.nodes,
        env=variables,
        backend=args.backend,
    )


def render(done: JobRecord, folder: Path) -> str:
    """The result in a few lines."""

    ppn = int(done.placement["nproc_per_node"])
    nodes = len(done.nodes)
    return (
        f"{nodes * ppn} ranks on {nodes} nodes, {format_seconds(done.seconds or 0.0)}\n"
        f"output, log and job.json: {folder}/"
    )
