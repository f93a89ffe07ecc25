"""``spr-cluster run``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.chosen_cluster import add_cluster_options
from cluster.console.display import format_seconds
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.shared.chosen_job import add_results_option, open_job_context
from jobs.cli.shared.job_options import (
    add_placement_options,
    add_queue_options,
    detachable,
    read_placement,
    results_folder,
)
from jobs.launchers.queue.session import run_job
from jobs.launchers.record import JobRecord
from jobs.program.plan import ProgramRequest, check_variables, collect_files, plan_program
from jobs.train.request import check_results

_EXAMPLES = """\
  spr-cluster run -- hostname                                 once per rank
  spr-cluster run --nodes 2 --ppn 2 -- python my_script.py --epochs 3
  spr-cluster run --files src --env SEED=7 -- python src/main.py
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "run",
        "Run a program in every rank, placed and pinned like `train`. The nodes receive the command's\n"
        "script from the working folder, and what --files names. Every rank has torch's RANK,\n"
        "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, and MASTER_PORT. What it writes to the folder\n"
        "$SPR_OUTPUT is fetched; that of each worker goes to a folder named after the node.",
        _EXAMPLES,
        run=detachable(run),
    )
    add_cluster_options(parser)
    add_placement_options(parser.add_argument_group("placement"))
    add_queue_options(parser.add_argument_group("queue"), retries=0)
    group = parser.add_argument_group("program")
    add = group.add_argument
    add(
        "--files",
        action="append",
        default=[],
        metavar="PATH",
        help="file or folder that the program needs; repeatable",
    )
    add("--large-files", action="store_true", help="allow more than 256 MiB")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable for the program; repeatable",
    )
    add_results_option(group, "the output")
    parser.add_argument(
        "program", nargs="+", metavar="PROGRAM", help="the program and its arguments, after --"
    )


def run(args: argparse.Namespace) -> int:
    now = datetime.now(timezone.utc)
    request = build_request(args, now)
    check_results(request.results)
    context = open_job_context(args, now)
    plan = plan_program(request, context.stack)
    done = run_job(context, lambda _: plan).record
    emit(args, render(done, request.results), asdict(done))
    return 0


def build_request(args: argparse.Namespace, now: datetime) -> ProgramRequest:
    """Return the options as a request. Raises :class:`UsageError` for invalid ones."""
    for flag in ("program", "files"):
        if "" in getattr(args, flag):
            raise UsageError(f"{flag if flag == 'program' else '--files'}: a word is empty")
    variables = check_variables(args.env)
    files = collect_files(args.program, args.files, Path.cwd(), large=args.large_files)
    return ProgramRequest(
        command=tuple(args.program),
        files=files,
        results=results_folder(args, "run", now),
        placement=read_placement(args),
        nodes=args.nodes,
        env=variables,
        backend=args.backend,
        retries=args.retries,
    )


def render(done: JobRecord, folder: Path) -> str:
    """Return the result in a few lines."""
    nodes = len(done.nodes)
    ranks = nodes * done.placement.nproc_per_node
    return (
        f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}, {format_seconds(done.seconds or 0.0)}\n"
        f"output, log, and job.json: {folder}/"
    )
