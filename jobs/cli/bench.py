"""``spr-cluster bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from cluster.cli.chosen_cluster import ClusterRequest, open_cluster
from cluster.console.display import format_table
from cluster.console.options import option, switch
from cluster.console.output import emit, wrap
from cluster.console.parser import Parser, add_request
from cluster.context import Context
from infra.ec2.inventory import find_group
from infra.errors import SprError, UsageError
from infra.instance_types import INSTANCE_TYPES
from infra.words import counted
from jobs.cli.shared.chosen_job import open_job_context
from jobs.experiments.bench import BenchRequest, BenchResult, NodeSpeed, bench, read_last_speeds
from jobs.worker.bench import LONGEST, SECONDS, SHORTEST


@dataclass(frozen=True, kw_only=True)
class BenchCommand(ClusterRequest):
    """Measure matrix products (in bf16 if the processor has it), memory, and all-reduce on all
    nodes, with the default ranks, cores, and backend of a training job. oneDNN itself reports
    whether AMX ran. The exit code is 1 if AMX is expected and did not run; a slow node is
    named, but is not a failure.

    examples:
      spr-cluster bench                   about a minute
      spr-cluster bench --seconds 30      longer, for steadier figures
      spr-cluster bench --last --json     the last result, kept on the head
    """

    seconds: float = option(
        f"seconds for each of the three measurements (default: {SECONDS:g})",
        SECONDS,
        parse=float,
        excludes="way",
    )
    last: bool = switch("show the last result without measuring", excludes="way")


def add_parser(parent: Parser) -> None:
    add_request(parent, "bench", run, BenchCommand)


def run(request: BenchCommand) -> int:
    if not SHORTEST <= request.seconds <= LONGEST:
        raise UsageError(
            f"--seconds {request.seconds:g} is out of range: {SHORTEST:g} to {LONGEST:g}"
        )
    ctx = open_cluster(request)

    def show(speeds: BenchResult) -> None:
        emit(request, lambda: wrap("\n".join(render(speeds, ctx))), speeds.as_dict())

    speeds = _measure(request, ctx, show)
    lacking = speeds.without_amx if speeds.amx_expected else ()
    if lacking:
        reports = "; ".join(f"{node.name}: {node.onednn}" for node in lacking)
        raise SprError(
            f"{len(lacking)} of {counted(len(speeds.nodes), 'node')} did not use AMX, which this "
            f"cluster requires: {reports}",
            hint="check that neither the nodes nor the stack set ONEDNN_MAX_CPU_ISA or "
            "ATEN_CPU_CAPABILITY, and the instance type in "
            f"`spr-cluster status {ctx.flags}`",
        )
    return 0


def _measure(
    request: BenchCommand, ctx: Context, show: Callable[[BenchResult], None]
) -> BenchResult:
    context = open_job_context(replace(request, name=ctx.name), datetime.now(timezone.utc))
    if request.last:
        speeds = read_last_speeds(context.open_host(context.cluster.head), context.cluster)
        show(speeds)
        return speeds
    record = find_group(ctx.clients.ec2, ctx.name).record
    required = bool(record.options["amx_required"]) if record else True
    has_amx = ctx.cloud.has_amx
    wanted = BenchRequest(request.seconds, amx_expected=has_amx and required, real=has_amx)
    return bench(context, wanted, show)


def render(speeds: BenchResult, ctx: Context) -> Iterator[str]:
    """Render the measurements as a table, with the peak and the slow nodes."""
    yield f"Cluster {speeds.cluster}, {speeds.when}, stack {speeds.stack}, torch {speeds.torch}"
    yield format_table([_HEADER.format(speeds.dtype).split("|"), *map(_row, speeds.nodes)])
    side = speeds.matrix_size
    yield f"Products of {side} x {side} in {speeds.dtype}: {speeds.dtype_reason}."
    yield _render_peak(speeds)
    yield from _render_all_reduce(speeds)
    instances = {node.name: node.instance for node in speeds.nodes}
    usual = "the other node's figure" if len(speeds.nodes) == 2 else "the nodes' median"
    for slow in speeds.slow_nodes:
        yield (
            f"SLOW: {slow.node} reaches {slow.share:.0%} of {usual} in {slow.what}; every step of a "
            "job waits for it"
        )
        yield f"  → {_remedy(instances[slow.node], ctx)}"


_HEADER = "node|type|threads|{}|of peak|memory|oneDNN"


def _row(node: NodeSpeed) -> Sequence[str]:
    share = node.peak_share
    return (
        node.name,
        node.type,
        str(node.threads),
        f"{node.gemm_tflops:.3g} TFLOPS",
        "-" if share is None else f"{share:.0%}",
        f"{node.memory_gb_s:.1f} GB/s",
        node.onednn,
    )


def _render_peak(speeds: BenchResult) -> str:
    known = {
        node.type: node.peak_tflops
        for node in speeds.nodes
        if node.peak_tflops and node.type in INSTANCE_TYPES
    }
    if not known:
        return "No peak to compare with: it is known for bf16 on bare metal with AMX only."
    return "Peak: " + "; ".join(
        f"{name} {peak:.1f} TFLOPS ({INSTANCE_TYPES[name].cores} cores at {INSTANCE_TYPES[name].ghz} GHz, "
        "the clock that EC2 states; it may be lower under AMX)"
        for name, peak in known.items()
    )


def _render_all_reduce(speeds: BenchResult) -> Iterator[str]:
    if not speeds.all_reduce:
        yield "All-reduce: skipped, because the cluster has one node."
        return
    yield f"All-reduce over {speeds.backend}, bus bandwidth:"
    yield format_table(
        [
            (
                f"  {_bytes(done.bytes)}",
                f"{done.seconds * 1e3:.2f} ms",
                f"{done.bus_gb_s:.3f} GB/s",
            )
            for done in speeds.all_reduce
        ]
    )


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _remedy(instance: str, ctx: Context) -> str:
    if not ctx.cloud.billed:
        return "the nodes share this machine with everything else on it: measure again"
    return (
        f"aws ec2 terminate-instances --region {ctx.cloud.region} --instance-ids {instance}, then "
        f"spr-cluster repair {ctx.flags}; data on that node is lost"
    )
