"""``spr-cluster types``: EC2's types with AMX, and what the same work costs on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.cli.chosen_cluster import open_cloud
from cluster.console.display import format_table, make_progress
from cluster.console.options import JsonRequest, argument, option, switch
from cluster.console.output import emit, wrap
from cluster.console.parser import Parser, add_request
from cluster.local_files import utc_now
from cluster.overview import look_up_prices
from infra.aws.clients import connect, has_credentials
from infra.aws.cloud import MissingCredentialsError, NoRegionError
from infra.cost.compared_types import (
    ComparedType,
    MeasuredJob,
    choose_types,
    compare_types,
)
from infra.cost.prices import Prices, table_prices, with_spot
from infra.errors import UsageError
from infra.files import read_object
from infra.instance_types import INSTANCE_TYPES, TABLE_REGION

_SHOWN = 25
_COLUMNS = (
    *("TYPE", "CORES", "MEMORY", "NETWORK", "AMX", "ON DEMAND", "SPOT", "$/PFLOPS-HOUR"),
    *("BOOT", "$ TO BOOT"),
)
_BASIS = (
    "AMX is the peak in TFLOPS: cores, times 1,024 bf16 operations per cycle, times the clock that EC2 "
    "lists. Training reaches a part of it. $/PFLOPS-HOUR divides the price by it, so it compares the same "
    "work. EC2 slows flex types down under continuous load. BOOT is the longest expected, and billed."
)

_BASIS_OF_JOB = (
    "The time includes the longest expected boot. Measured is the job's own type. In projections, "
    "computing takes as much longer as the AMX peak is lower, and everything else as long. Prices are on "
    "demand, without disks."
)


@dataclass(frozen=True, kw_only=True)
class TypesRequest(JsonRequest):
    """Compare the instance types that have AMX, the cheapest for the same work first. Prices are
    today's in the region, if this machine has AWS credentials, else those of the tool's table.

    examples:
      spr-cluster types
      spr-cluster types c7i m7i.metal-24xl --all
      spr-cluster types --region eu-west-1 --json
      spr-cluster types c7i m7i --for results/squad-20260731-142501-k3f
    """

    names: tuple[str, ...] = argument(
        "types or families, such as c7i (default: from 64 vCPUs)", (), takes="*", metavar="TYPE"
    )
    region: str | None = option("AWS region (default: AWS_REGION, else your AWS configuration)")
    for_: str | None = option(
        "what a finished job would take and cost on as many nodes: its results folder",
        flags=("--for",),
        metavar="DIR",
    )
    all: bool = switch(f"list all sizes, not only the {_SHOWN} cheapest for their work")


def add_parser(parent: Parser) -> None:
    add_request(parent, "types", run, TypesRequest)


def read_job(folder: Path) -> MeasuredJob:
    """Return the job of a results folder. Raises :class:`UsageError` if it was not measured on AWS."""
    receipt = read_object(folder / "results.json").get("receipt")
    record = read_object(folder / "job/job.json")
    nodes = record.get("nodes") or [{}]
    kind = INSTANCE_TYPES.get(nodes[0].get("type", ""))
    if not receipt or record.get("cloud") != "aws" or not kind or not kind.amx_tflops:
        raise UsageError(
            f"--for {folder}: expected the results of a training job on AWS, with a receipt, on a type "
            "with AMX",
            hint="spr-cluster fetch JOB writes the receipt into results.json",
        )
    seconds = {name: part["seconds"] for name, part in receipt["parts"].items()}
    for name in ("boot and installation", "idle before it", "failed or replaced nodes"):
        seconds.pop(name, None)
    computing = seconds.pop("computing", 0.0)
    return MeasuredJob(
        kind, len(nodes) * record.get("node_share", 1), computing, sum(seconds.values())
    )


def run(request: TypesRequest) -> int:
    job = read_job(Path(request.for_)) if request.for_ else None
    chosen = choose_types(request.names, every=request.all)
    if job and job.type not in chosen:
        chosen = (job.type, *chosen)
    prices = _look_up(request.region, [each.name for each in chosen])
    found = compare_types(chosen, prices)
    shown = found if request.all or request.names else found[:_SHOWN]
    shown += [each for each in found if job and each.type == job.type and each not in shown]
    sources = dict.fromkeys(each.price.source for each in found if each.price)
    known = f"Prices in {prices.region}: {'; '.join(sources) or 'unknown'}"
    lines = [_render(shown, job)]
    if hidden := len(found) - len(shown):
        lines.append(f"{hidden} dearer types: --all")
    lines += [
        _BASIS_OF_JOB if job else _BASIS,
        f"{known} ({prices.problem})." if prices.problem else f"{known}.",
    ]
    result = {
        "region": prices.region,
        "types": [{**each.as_dict(), **(job.as_dict(each) if job else {})} for each in found],
        "price_problem": prices.problem or None,
    }
    emit(request, wrap("\n".join(lines)), result)
    return 0


def _look_up(region: str | None, names: Sequence[str]) -> Prices:
    """Return the region's prices, or the table's without a region or credentials."""
    progress = make_progress()
    try:
        cloud = open_cloud("aws", region, progress)
    except (NoRegionError, MissingCredentialsError) as error:
        return replace(table_prices(region or TABLE_REGION, names), problem=error.message)
    if not has_credentials(cloud):
        return replace(table_prices(cloud.region, names), problem="no AWS credentials found")
    clients, now = connect(cloud), utc_now()
    with progress.phase(f"Prices in {cloud.region}"):
        return with_spot(look_up_prices(cloud, clients, names, now), clients.ec2, now)


def _render(found: Sequence[ComparedType], job: MeasuredJob | None) -> str:
    if job:
        rows = [(each.type.name, job.as_dict(each)) for each in found]
        rows.sort(key=lambda row: row[1]["job_usd"] or float("inf"))
        cells = [
            (name, f"{row['job_minutes']:.0f} min", _usd(row["job_usd"]), row["job_basis"])
            for name, row in rows
        ]
        return format_table([("TYPE", "TIME", "COST", "BASIS"), *cells], ("TIME", "COST"))
    return format_table(
        [_COLUMNS, *(_row(each) for each in found)], ("$ TO BOOT", "NETWORK", "SPOT", "MEMORY")
    )


def _usd(value: float | None) -> str:
    return "?" if value is None else f"${value:.2f}"


def _row(each: ComparedType) -> tuple[str, ...]:
    kind = each.type
    return (
        f"{kind.name}{' (throttled)' if kind.is_flex else ''}",
        str(kind.cores),
        f"{kind.memory_gib:g} GiB",
        "-" if kind.gbit is None else f"{kind.gbit:g} Gbit/s",
        f"{kind.amx_tflops:.0f}",
        _usd(each.price.usd if each.price else None),
        _usd(each.spot),
        _usd(each.usd_per_pflops_hour),
        f"{kind.boot_minutes} min",
        _usd(each.usd_to_boot),
    )
