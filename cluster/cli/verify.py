"""``spr-cluster verify``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.context import Context
from cluster.nodes import Cluster, find_cluster
from cluster.running_job import find_running_job
from cluster.verify.checks import CLUSTER, CheckResult, Expected, Verdict, expect, judge_hardware
from cluster.verify.launcher_probe import Hello, say_hello
from cluster.verify.verify import Examination, examine
from infra.inventory import describe_inventory
from provision.host import Host
from provision.stacks import load_stack

_EXAMPLES = """\
  spr-cluster verify
  spr-cluster verify --name bert --json
  spr-cluster verify --no-bandwidth             leaves the network to whoever uses it
"""
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "dim"}
_MOST_NAMED = 4
_WIDE = 160


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "verify",
        "Ask every node over the way that jobs go: AMX and the permission to use it, cores, memory,\n"
        "clock, power settings, software, disk. Then have the nodes try one another: names, ports,\n"
        "SSH, latency, bandwidth; and start a rank on each with mpirun. A verdict for each check, and\n"
        "what to do about it. Nothing is changed. Exit code 1 where a check failed; warnings: 0.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.add_argument(
        "--no-bandwidth", action="store_true", help="do not fill the network for a second"
    )
    parser.add_argument(
        "--judge-hardware",
        action="store_true",
        help="measure containers by the machine type that they stand for, AMX included",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:

    progress = make_progress()
    ctx = open_context(args, open_chosen_cloud(args), progress=progress)
    cluster = find_cluster(ctx.clients.ec2, args.name)
    expected = build_expected(ctx, cluster, judge=args.judge_hardware)
    open_host = ctx.host_opener()
    with progress.phase(f"Verify cluster {args.name}"):
        head = open_host(cluster.head)
        busy = find_running_job(head)
        bandwidth = not (args.no_bandwidth or busy)
        found = examine(cluster, expected, open_host, progress, bandwidth=bandwidth)
        with progress.phase("Start a rank on every node"):
            found = found.with_results(check_launcher(head, cluster, found, busy))
    if args.json:
        print(json.dumps(as_dict(ctx, expected, found)))
    else:
        show(found, expected)
    return 1 if found.verdict is Verdict.FAIL else 0


def build_expected(ctx: Context, cluster: Cluster, *, judge: bool) -> Expected:
    """What the cluster should be, by its record; ``judge``: as real machines of its type."""

    found = describe_inventory(ctx.clients.ec2, cluster.name, ("security_groups",))
    wishes = found.record.options if found.record else {}
    expected = expect(ctx.cloud, cluster, wishes, load_stack(cluster.stack))
    if judge:
        return replace(judge_hardware(expected, cluster), amx_required=True)
    return expected


def check_launcher(
    head: Host, cluster: Cluster, found: Examination, busy: str | None
) -> list[CheckResult]:
    """mpirun itself, where nothing is in its way."""

    if busy:
        text = f"not tried, nor the bandwidth: job {busy} runs, and latencies show it"
        return [CheckResult(CLUSTER, "mpirun", Verdict.UNKNOWN, text)]
    if found.unreached:
        text = f"not tried: the head can't enter {name_nodes(found.unreached)}"
        return [CheckResult(CLUSTER, "mpirun", Verdict.UNKNOWN, text)]
    return judge_hello(say_hello(head, [node.name for node in cluster.nodes]))


def judge_hello(hello: Hello) -> list[CheckResult]:
    """A failure of mpirun itself, or of the nodes whose rank has no torch, or one good result."""

    wanted = "a rank on each node that imports torch"
    if hello.error:
        remedy = "put right first what else failed; then `train` shows the whole output of mpirun"
        return [CheckResult(CLUSTER, "mpirun", Verdict.FAIL, hello.error, wanted, remedy)]
    if hello.errors:
        remedy = "its files are not the others': what else failed on it, else begin anew"
        return [
            CheckResult(node, "mpirun", Verdict.FAIL, f"no torch: {why}", wanted, remedy)
            for node, why in hello.errors.items()
        ]
    versions = ", ".join(sorted(set(hello.torch.values())))
    text = f"a rank on each of {len(hello.torch)} nodes, torch {versions}"
    return [CheckResult(CLUSTER, "mpirun", Verdict.OK, text)]


def as_dict(ctx: Context, expected: Expected, found: Examination) -> dict[str, object]:
    """Everything for ``--json``."""
    return {
        "cluster": expected.cluster,
        "cloud": ctx.cloud.name,
        "region": ctx.cloud.region,
        "verdict": found.verdict.value,
        "judged_as": expected.machine.name if expected.machine else None,
        "checks": [result.as_dict() for result in found.results],
        "links": [link.as_dict() for link in found.links.links] if found.links else [],
    }


def show(found: Examination, expected: Expected) -> None:
    """The table, then what to do, then one line."""

    wide = None if sys.stdout.isatty() else _WIDE
    console = Console(width=wide, highlight=False)
    console.print(build_table(found.results, len(expected.addresses)))
    for line in list_remedies(found.results):
        console.print(line, markup=False, soft_wrap=True)
    console.print(conclude(found, expected), markup=False, soft_wrap=True)


def build_table(results: Sequence[CheckResult], nodes: int) -> Table:
    """A line for each check and verdict; nodes that say the same share it."""

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("nodes", max_width=30)
    table.add_column("found", ratio=3)
    table.add_column("wanted", ratio=2)
    for group in group_results(results):
        first = group[0]
        colour = _COLOURS[first.verdict.value]
        names = [result.node for result in group]
        shown = "all" if len(names) == nodes > 1 else name_nodes(names)
        cells = [first.check, f"[{colour}]{first.verdict.value}[/]", shown]
        table.add_row(*cells, escape(describe_group(group)), escape(first.wanted))
    return table


def group_results(results: Sequence[CheckResult]) -> list[list[CheckResult]]:
    """Results that can share a line: of one check and verdict, and alike where that is not good."""

    groups: dict[tuple[str, ...], list[CheckResult]] = {}
    for result in results:
        key = [result.check, result.verdict.value]
        if result.verdict in (Verdict.WARN, Verdict.FAIL):
            key += [result.found, result.wanted]
        groups.setdefault(tuple(key), []).append(result)
    return list(groups.values())


def describe_group(group: Sequence[CheckResult]) -> str:
    """What the nodes of a line say, node by node where it differs."""
    if len({result.found for result in group}) == 1:
        return group[0].found
    told = "; ".join(f"{result.node}: {result.found}" for result in group[:_MOST_NAMED])
    return told + (f"; … ({len(group)} in --json)" if len(group) > _MOST_NAMED else "")


def name_nodes(nodes: Sequence[str]) -> str:
    """The nodes by name, the first few of many."""
    more = len(nodes) - _MOST_NAMED
    return ", ".join(nodes[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def list_remedies(results: Sequence[CheckResult]) -> list[str]:
    """A paragraph for each thing to do, failures first."""

    groups: dict[tuple[str, str, str], list[str]] = {}
    for verdict in (Verdict.FAIL, Verdict.WARN):
        for result in results:
            if result.verdict is verdict and result.remedy:
                key = (verdict.value, result.check, result.remedy)
                groups.setdefault(key, []).append(result.node)
    return [
        f"{verdict}: {check} on {name_nodes(nodes)}\n  → {remedy}"
        for (verdict, check, remedy), nodes in groups.items()
    ]


def conclude(found: Examination, expected: Expected) -> str:
    """One line: how many checks failed, and whether there is AMX. Never "ok" without it."""

    counts = {
        verdict: sum(result.verdict is verdict for result in found.results) for verdict in Verdict
    }
    without = [r.node for r in found.results if r.check == "amx" and r.verdict is not Verdict.OK]
    words = [
        f"{counts[Verdict.FAIL]} failed",
        f"{counts[Verdict.WARN]} to be looked at",
        f"{counts[Verdict.OK]} ok",
        f"{counts[Verdict.UNKNOWN]} not judged or not known here",
    ]
    amx = f"; no AMX on {name_nodes(without)}" if without else ""
    return f"Cluster {expected.cluster}: {', '.join(words)}{amx}."
