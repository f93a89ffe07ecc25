"""``spr-cluster report``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.instance_types import find_instance_type
from jobs.report.figures import find_price, reckon_cost
from jobs.report.folder import find_folder, read_run
from jobs.report.parts import Report
from jobs.report.sections import build_report
from jobs.report.write import PAGE, Written, write_report

_EXAMPLES = """\
  spr-cluster report                                  of the newest results in ./results
  spr-cluster report results/squad-20260731-142501 --png
  spr-cluster report four --compare one --compare two --instance-type r7iz.metal-16xl
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "report",
        "Write one HTML page from a results folder: loss, each rank's speed over time, where the time\n"
        "went, scaling, cost per epoch, environment and placement. It needs no network and no script,\n"
        "and can be mailed. What the folder does not tell is named, not guessed.",
        _EXAMPLES,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="DIR|JOB",
        help="a results folder, or a job's below ./results (default: the newest there)",
    )
    parser.add_argument("--output", metavar="FILE", help="the page (default: DIR/report.html)")
    parser.add_argument(
        "--png", action="store_true", help="also the charts as pictures beside it; needs matplotlib"
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="DIR|JOB",
        help="another run, on other nodes, to judge the scaling by; may be given several times",
    )
    parser.add_argument(
        "--instance-type",
        metavar="TYPE",
        help="the nodes' EC2 type, for the cost (default: as job.json in the folder has it)",
    )
    parser.add_argument(
        "--price",
        type=float,
        metavar="USD",
        help="what a node costs an hour, instead of the list's",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:

    _check_price(args)
    found = read_run(find_folder(args.folder))
    others = [read_run(find_folder(wish)) for wish in args.compare]
    price = find_price(found, args.instance_type, args.price)
    report = build_report(found, others, reckon_cost(found, price) if price else None)
    page = Path(args.output) if args.output else found.folder / PAGE
    written = write_report(report, page, png=args.png)
    if args.json:
        print(json.dumps(_as_dict(report, written)))
    else:
        print("\n".join(str(path) for path in (written.page, *written.pictures)))
    return 0


def _check_price(args: argparse.Namespace) -> None:

    if args.instance_type is not None:
        find_instance_type(args.instance_type)
        if args.price is not None:
            raise UsageError("--price and --instance-type exclude each other: give one of them")
    if args.price is not None and not 0 < args.price <= 1000:
        raise UsageError(
            f"--price {args.price:g}: expected US dollars an hour, above 0, at most 1000"
        )


def _as_dict(report: Report, written: Written) -> dict[str, Any]:
    cost = report.cost
    return {
        "report": str(written.page),
        "png": [str(path) for path in written.pictures],
        "charts": [section.name for section in report.sections if section.chart],
        "missing": [section.name for section in report.sections if not section.chart],
        "warnings": list(report.warnings),
        "usd_per_epoch": cost.epoch if cost else None,
        "usd_of_run": cost.run if cost else None,
    }
