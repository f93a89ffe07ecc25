"""``spr-cluster verify``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.markup import escape
from rich.table import Table

from cluster.cli.chosen_cluster import ClusterRequest, open_cluster
from cluster.console.display import make_console, make_progress
from cluster.console.options import switch
from cluster.console.output import emit, wrap
from cluster.console.parser import Parser, add_request
from cluster.context import Context
from cluster.lifecycle.host_identity import FIRST_CONTACT, check_head_identity, verified_by
from cluster.nodes import Cluster
from cluster.verify.results import (
    CLUSTER,
    CheckResult,
    Expected,
    Verdict,
    expect,
    name_some,
    with_hardware,
)
from cluster.verify.verify import VerifyReport, verify_cluster
from infra.ec2.inventory import find_group
from infra.errors import SprError
from infra.instance_types import find_machine
from infra.words import counted
from provision.stacks.load import load_stack

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}
_MAX_SHOWN = 4
PROGRAMS = ("spr-cluster ", "aws ")


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(ClusterRequest):
    """Check each node over the SSH path that jobs use: AMX, cores, memory, clock, power settings,
    software, and disk. Then check the network between the nodes: names, ports, SSH, latency, and
    bandwidth. Finally, start a rank on each node with mpirun. Prints a verdict for each check and
    how to fix problems. Changes nothing. The exit code is 1 if a check failed, else 0.

    examples:
      spr-cluster verify
      spr-cluster verify --name bert --json
      spr-cluster verify --no-bandwidth
    """

    bandwidth: bool = switch(
        "skip the bandwidth test, which takes a second", default=True, flags=("--no-bandwidth",)
    )
    judge_hardware: bool = switch(
        "compare containers with the machine type they stand for, AMX included"
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "verify", run, VerifyRequest)


def run(request: VerifyRequest) -> int:
    progress = make_progress()
    ctx = open_cluster(request, progress)
    cluster = ctx.find_cluster()
    cluster.require_connected()
    expected = build_expected(ctx, cluster, judge=request.judge_hardware)
    with progress.phase(f"Verify cluster {ctx.name}"):
        if verified_by(ctx.events).get(cluster.head.instance.id) == FIRST_CONTACT:
            progress.note(check_head_identity(ctx, cluster.head))
        report = verify_cluster(
            cluster, expected, ctx.host_opener(), progress, bandwidth=request.bandwidth
        )
    table = render_results(report.results, len(expected.addresses))
    emit(request, f"{table}\n{summarize(report, expected)}", as_dict(ctx, expected, report))
    if report.verdict is Verdict.FAIL:
        raise SprError(describe_failures(report.results))
    return 0


def build_expected(ctx: Context, cluster: Cluster, *, judge: bool) -> Expected:
    """Return the cluster's recorded state; with ``judge``, expect real machines of its type."""
    found = find_group(ctx.clients.ec2, cluster.name)
    spec = found.record.options if found.record else {}
    machine = find_machine(ctx.clients.ec2, cluster.head.instance.instance_type)
    expected = expect(ctx.cloud, cluster, spec, load_stack(cluster.stack), machine)
    if not judge:
        return expected
    return replace(with_hardware(expected, cluster, machine), amx_required=True)


def as_dict(ctx: Context, expected: Expected, report: VerifyReport) -> dict[str, object]:
    """Return the whole report for ``--json``."""
    return {
        "cluster": expected.cluster,
        "cloud": ctx.cloud.name,
        "region": ctx.cloud.region,
        "verdict": report.verdict.value,
        "judged_as": expected.machine.name if expected.machine else None,
        "checks": [result.as_dict() for result in report.results],
        "links": [link.as_dict() for link in report.network.links] if report.network else [],
    }


def render_results(results: Sequence[CheckResult], nodes: int) -> str:
    """Return the table, in color for a terminal, and the remedies."""
    console = make_console()
    with console.capture() as captured:
        console.print(build_table(results, nodes))
    return "\n".join([captured.get().rstrip("\n"), *list_remedies(results)])


def build_table(results: Sequence[CheckResult], nodes: int) -> Table:
    """Return a table with one row per check and verdict; nodes with equal results share a row."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found")
    for group in group_results(results):
        check, verdict = group[0].check, group[0].verdict.value
        style = _COLORS[verdict]
        table.add_row(check, f"[{style}]{verdict}[/]", escape(describe_group(group, nodes)))
    return table


def group_results(results: Sequence[CheckResult]) -> list[list[CheckResult]]:
    """Group results of the same check and verdict; problems also need the same finding."""
    groups: dict[tuple[str, ...], list[CheckResult]] = {}
    for result in results:
        key = [result.check, result.verdict.value]
        if result.verdict in (Verdict.WARN, Verdict.FAIL):
            key += [result.found, result.wanted]
        groups.setdefault(tuple(key), []).append(result)
    return list(groups.values())


def describe_group(group: Sequence[CheckResult], nodes: int) -> str:
    """Describe what a row's nodes have in common, or each of the first few if they differ."""
    first, names = group[0], [result.node for result in group]
    if len({result.found for result in group}) > 1:
        found = "; ".join(f"{result.node}: {result.found}" for result in group[:_MAX_SHOWN])
        found += f"; … ({len(group)} in --json)" if len(group) > _MAX_SHOWN else ""
    elif names == [CLUSTER] or len(names) == nodes:
        found = first.found
    else:
        found = f"{name_some(names)}: {first.found}"
    return f"{found}\nexpected: {first.wanted}" if first.wanted else found


def list_remedies(results: Sequence[CheckResult]) -> list[str]:
    """Return the remedies, failures first. Commands stay on one line, so they can be copied."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for verdict in (Verdict.FAIL, Verdict.WARN):
        for result in results:
            if result.verdict is verdict and result.remedy:
                key = (verdict.value, result.check, result.remedy)
                groups.setdefault(key, []).append(result.node)
    lines = []
    for (verdict_, check, remedy), nodes in groups.items():
        lines.append(wrap(f"{verdict_}: {check}{_place(nodes)}"))
        mark = "→"
        for part in remedy.splitlines():
            text = f"  {mark} {part}"
            lines.append(text if part.startswith(PROGRAMS) else wrap(text, 4))
            mark = " "
    return lines


def _place(nodes: Sequence[str]) -> str:
    return "" if nodes == [CLUSTER] else f" on {name_some(nodes)}"


def describe_failures(results: Sequence[CheckResult]) -> str:
    """Return an error message that lists the failed checks and their nodes."""
    nodes: dict[str, list[str]] = {}
    for result in results:
        if result.verdict is Verdict.FAIL:
            nodes.setdefault(result.check, []).append(result.node)
    listed = ", ".join(f"{check}{_place(where)}" for check, where in nodes.items())
    failed = sum(map(len, nodes.values()))
    return f"{failed} of {counted(len(results), 'check')} failed: {listed}"


def summarize(report: VerifyReport, expected: Expected) -> str:
    """Return one line with the number of results by verdict, and the nodes without AMX."""
    results = report.results
    count = {verdict: sum(r.verdict is verdict for r in results) for verdict in Verdict}
    without = [r.node for r in results if r.check == "amx" and r.verdict is not Verdict.OK]
    amx = f"; no AMX on {name_some(without)}" if without else ""
    return wrap(
        f"Cluster {expected.cluster}: {count[Verdict.FAIL]} failed, "
        f"{counted(count[Verdict.WARN], 'warning')}, {count[Verdict.OK]} ok, "
        f"{count[Verdict.SKIPPED]} skipped{amx}."
    )
