"""``bench``: measure the nodes of a cluster, and keep the result on its head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cluster.nodes import Cluster, Node
from infra.ec2.tags import render_time
from infra.errors import JobError, UsageError
from infra.files import parse_as
from jobs.experiments.bench_results import AllReduce, BenchResult, NodeSpeed, find_peak
from jobs.launchers.files import save_on_head
from jobs.launchers.plan import JobPlan
from jobs.launchers.queue.session import JobContext, run_job
from jobs.train.request import require_able_stack
from jobs.worker.bench import BenchOptions
from provision.host import Host
from provision.stacks.stack import Stack

FOLDER = "spr-bench"
"""In the login user's home on the head: one file per measurement, named by its time."""


@dataclass(frozen=True)
class BenchRequest:
    """``seconds`` per measurement. ``real`` means that the machines are of the type that they claim."""

    seconds: float
    amx_expected: bool
    real: bool


def bench(context: JobContext, request: BenchRequest) -> BenchResult:
    """Measure each node and the network between them, and keep the result on the head.

    Raises :class:`JobError` if that fails.
    """
    require_able_stack(context.stack, "bench")
    plan = plan_bench(request, context.stack)
    done = run_job(context, lambda _: plan)
    result = done.last_event("result")
    if result is None:
        raise JobError(
            "the measurement ended without a result",
            hint=f"run `spr-cluster bench {context.cluster.flags}` again",
        )
    speeds = read_result(result, context.cluster, context.stack, request, context.now)
    text = json.dumps(speeds.as_dict(), indent=1) + "\n"
    save_on_head(context.open_host(context.cluster.head), FOLDER, text, context.now)
    return speeds


def plan_bench(request: BenchRequest, stack: Stack) -> JobPlan:
    """Return a plan with the ranks, cores, and backend that a training job would have. Pure."""
    return JobPlan(
        kind="bench",
        module="worker.bench",
        argv=tuple(BenchOptions(stack.backend, request.seconds).to_argv()),
        backend=stack.backend,
        title="Measure",
    )


def read_result(
    result: Mapping[str, Any], cluster: Cluster, stack: Stack, request: BenchRequest, now: datetime
) -> BenchResult:
    """Return the ranks' figures by node. mpirun fills the nodes in the order of the hostfile."""
    ranks = sorted(result["ranks"], key=lambda rank: int(rank["rank"]))
    each = len(ranks) // len(cluster.nodes)
    groups = [ranks[first : first + each] for first in range(0, len(ranks), each)]
    dtype = result["dtype"]
    nodes = [
        _as_node(
            node, group, find_peak(node.instance.instance_type, dtype=dtype, real=request.real)
        )
        for node, group in zip(cluster.nodes, groups, strict=True)
    ]
    return BenchResult(
        when=render_time(now),
        cluster=cluster.name,
        stack=stack.name,
        backend=result["backend"],
        dtype=dtype,
        dtype_reason=result["dtype_reason"],
        matrix_size=result["matrix_size"],
        amx_expected=request.amx_expected,
        nodes=tuple(nodes),
        all_reduce=tuple(AllReduce(**row) for row in result["all_reduce"]),
        torch=result["torch"],
    )


def _as_node(node: Node, ranks: Sequence[Mapping[str, Any]], peak: float | None) -> NodeSpeed:
    # One rank without AMX slows all others down, so it represents its node.
    worst = min(ranks, key=lambda rank: bool(rank["amx"]))
    return NodeSpeed(
        name=node.name,
        instance=node.instance.id,
        type=node.instance.instance_type,
        hostname=ranks[0]["hostname"],
        threads=sum(rank["threads"] for rank in ranks),
        gemm_tflops=sum(rank["gemm_tflops"] for rank in ranks),
        peak_tflops=peak,
        memory_gb_s=sum(rank["memory_gb_s"] for rank in ranks),
        amx=worst["amx"],
        onednn=worst["onednn"],
    )


def read_last_speeds(head: Host, cluster: Cluster) -> BenchResult:
    """Return the last saved measurement. Raises :class:`UsageError` if there is none."""
    text = head.run(f'cat "$(ls -1 ~/{FOLDER}/*.json 2>/dev/null | tail -n 1)" 2>/dev/null || true')
    if not text.stdout.strip():
        raise UsageError(
            f"cluster {cluster.name!r} has not been measured yet",
            hint=f"run `spr-cluster bench {cluster.flags}`",
        )
    try:
        return parse_as(BenchResult, text.stdout, f"the last file in ~/{FOLDER}")
    except UsageError as error:
        raise JobError(
            f"the measurement on node0 can't be read: {error.message}",
            hint=f"run `spr-cluster bench {cluster.flags}` again",
        ) from None
