"""``spr-cluster report``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.console.options import JsonRequest, argument, option
from cluster.console.output import emit
from cluster.console.parser import Parser, add_request
from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES
from infra.words import nearest
from jobs.report.comparison import compare
from jobs.report.figures import find_price
from jobs.report.page import EPOCH, PAGE, RUN, Report, write_page
from jobs.report.results_folder import find_folder, read_run
from jobs.report.sections import build_report
from jobs.train.request import expand_home


@dataclass(frozen=True, kw_only=True)
class ReportRequest(JsonRequest):
    """Write one HTML page from a results folder: loss, speed of each rank over time, time by phase,
    scaling, cost per epoch, environment, and placement. The page contains no scripts and needs no
    network. It lists what the folder lacks. With --compare, it prints what differs from another run
    in options, data, versions, hardware, and scores.

    examples:
      spr-cluster report                            the newest in ./results
      spr-cluster report results/squad-20260731-142501-k3f
      spr-cluster report --compare one other      what differs between two runs
      spr-cluster report four --compare one --compare two --price 6.4
    """

    folder: str | None = argument(
        "results folder, or job below ./results (default: the newest there)",
        None,
        metavar="DIR|JOB",
    )
    output: str | None = option("path of the page (default: DIR/report.html)", metavar="FILE")
    compare: tuple[str, ...] = option(
        "another run: print what differs, and add it to the scaling chart; repeatable",
        (),
        repeats=True,
        metavar="DIR|JOB",
    )
    instance_type: str | None = option(
        "EC2 type of the nodes, for the cost (default: from job.json in the folder)",
        metavar="TYPE",
    )
    price: float | None = option(
        "price per node and hour, instead of the list price", parse=float, metavar="USD"
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "report", run, ReportRequest)


def run(request: ReportRequest) -> int:
    _check_price(request)
    found = read_run(find_folder(request.folder))
    others = [read_run(find_folder(name)) for name in request.compare]
    price = find_price(found, request.instance_type, request.price)
    report = build_report(found, others, price)
    page = expand_home(request.output) if request.output else found.folder / PAGE
    write_page(report, page)
    comparisons = [compare(each, found) for each in others]
    text = "\n\n".join([*(each.as_text() for each in comparisons), str(page)])
    compared = [asdict(each) for each in comparisons]
    emit(request, text, {**_as_dict(report, page), "comparisons": compared})
    return 0


def _check_price(request: ReportRequest) -> None:
    if (name := request.instance_type) is not None:
        known = [each.name for each in INSTANCE_TYPES.values() if each.table_usd]
        if name not in known:
            raise UsageError(
                f"the table has no price of {name!r}{nearest(name, known, 3, 0.4)}",
                hint="give the price per node and hour: --price USD",
            )
        if request.price is not None:
            raise UsageError("--price and --instance-type can't be used together")
    if request.price is not None and not 0 < request.price <= 1000:
        raise UsageError(
            f"--price {request.price:g}: expected US dollars per hour, above 0, at most 1000"
        )


def _as_dict(report: Report, page: Path) -> dict[str, Any]:
    return {
        "report": str(page),
        "charts": [section.name for section in report.sections if section.chart],
        "missing": [section.name for section in report.sections if not section.chart],
        "warnings": list(report.warnings),
        "usd_per_epoch": report.usd(EPOCH),
        "usd_of_run": report.usd(RUN),
        "receipt": report.receipt.as_dict() if report.receipt else None,
    }
