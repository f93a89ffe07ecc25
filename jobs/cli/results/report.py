"""``spr-cluster report``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command, add_json_option
from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES
from infra.words import nearest
from jobs.report.figures import compute_cost, find_price
from jobs.report.page import PAGE, write_page
from jobs.report.results_folder import find_folder, read_run
from jobs.report.sections import Report, build_report

_EXAMPLES = """\
  spr-cluster report                            the newest in ./results
  spr-cluster report results/squad-20260731-142501-k3f
  spr-cluster report four --compare one --compare two --price 6.4
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "report",
        "Write one HTML page from a results folder: loss, speed of each rank over time, time by phase,\n"
        "scaling, cost per epoch, environment, and placement. The page contains no scripts and needs no\n"
        "network. It lists what the folder lacks.",
        _EXAMPLES,
        run=run,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="DIR|JOB",
        help="results folder, or job below ./results (default: the newest there)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="path of the page (default: DIR/report.html)"
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="DIR|JOB",
        help="another run, on another number of nodes, for the scaling chart; can be repeated",
    )
    parser.add_argument(
        "--instance-type",
        metavar="TYPE",
        help="EC2 type of the nodes, for the cost (default: from job.json in the folder)",
    )
    parser.add_argument(
        "--price",
        type=float,
        metavar="USD",
        help="price per node and hour, instead of the list price",
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    _check_price(args)
    found = read_run(find_folder(args.folder))
    others = [read_run(find_folder(name)) for name in args.compare]
    price = find_price(found, args.instance_type, args.price)
    report = build_report(found, others, compute_cost(found, price) if price else None)
    page = Path(args.output) if args.output else found.folder / PAGE
    write_page(report, page)
    emit(args, str(page), _as_dict(report, page))
    return 0


def _check_price(args: argparse.Namespace) -> None:
    if args.instance_type is not None:
        _check_table(args.instance_type)
        if args.price is not None:
            raise UsageError("--price and --instance-type can't be used together")
    if args.price is not None and not 0 < args.price <= 1000:
        raise UsageError(
            f"--price {args.price:g}: expected US dollars per hour, above 0, at most 1000"
        )


def _check_table(name: str) -> None:
    known = [each.name for each in INSTANCE_TYPES.values() if each.table_usd]
    if name not in known:
        raise UsageError(
            f"the table has no price of {name!r}{nearest(name, known, 3, 0.4)}",
            hint="give the price per node and hour: --price USD",
        )


def _as_dict(report: Report, page: Path) -> dict[str, Any]:
    cost = report.cost
    return {
        "report": str(page),
        "charts": [section.name for section in report.sections if section.chart],
        "missing": [section.name for section in report.sections if not section.chart],
        "warnings": list(report.warnings),
        "usd_per_epoch": cost.epoch if cost else None,
        "usd_of_run": cost.run if cost else None,
    }
