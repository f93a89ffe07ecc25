"""``bench``: measure the nodes of a cluster, find slow ones, and keep the result on its head."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from cluster.nodes import Cluster, Node
from infra.ec2.tags import render_time
from infra.errors import JobError, UsageError
from infra.files import parse_as
from infra.instance_types import INSTANCE_TYPES
from jobs.places.files import save_on_head
from jobs.places.plan import JobPlan
from jobs.places.queue.session import JobContext, run_job
from jobs.train.request import require_able_stack
from jobs.worker.bench import BenchOptions
from provision.host import Host
from provision.stacks.stack import Stack

SLOW_BELOW = 0.9
"""A node below this share of the nodes' median is slow. Equal machines differ by a few percent."""


@dataclass(frozen=True)
class NodeSpeed:
    """One node's figures, summed over its ranks. ``peak_tflops`` is ``None`` if unknown."""

    name: str
    instance: str
    type: str
    hostname: str
    threads: int
    gemm_tflops: float
    peak_tflops: float | None
    memory_gb_s: float
    amx: bool
    onednn: str

    @property
    def peak_share(self) -> float | None:
        """Fraction of the peak, 0 to 1; ``None`` if the peak is unknown."""
        return self.gemm_tflops / self.peak_tflops if self.peak_tflops else None


@dataclass(frozen=True)
class SlowNode:
    """A node that slows every step of a job; ``share`` is relative to the nodes' median."""

    node: str
    what: str
    share: float


@dataclass(frozen=True)
class AllReduce:
    """The speed at one message size, the median of its repeats."""

    bytes: int
    seconds: float
    repeats: int
    bus_gb_s: float


@dataclass(frozen=True)
class BenchResult:
    """A finished `bench`; ``all_reduce`` is empty on one node."""

    when: str
    cluster: str
    stack: str
    backend: str
    dtype: str
    dtype_reason: str
    matrix_size: int
    amx_expected: bool
    nodes: Annotated[tuple[NodeSpeed, ...], Field(min_length=1)]
    all_reduce: tuple[AllReduce, ...]
    torch: str

    @property
    def slow_nodes(self) -> tuple[SlowNode, ...]:
        return find_slow(self.nodes)

    @property
    def without_amx(self) -> tuple[NodeSpeed, ...]:
        return tuple(node for node in self.nodes if not node.amx)

    def as_dict(self) -> dict[str, Any]:
        """Return measurements and conclusions, for ``--json`` and the file on the head."""
        nodes = [{**asdict(node), "peak_share": node.peak_share} for node in self.nodes]
        return {
            **asdict(self),
            "nodes": nodes,
            "slow_nodes": [asdict(slow) for slow in self.slow_nodes],
            "amx": not self.without_amx,
        }


def find_peak(instance_type: str, *, dtype: str, real: bool) -> float | None:
    """Return the peak TFLOPS for ``dtype``; ``None`` if unknown.

    It is known only for bf16 with AMX on a whole machine: a virtual machine shares its processor, and the
    embedded cloud's machines (not ``real``) only carry the type's name.
    """
    machine = INSTANCE_TYPES.get(instance_type)
    if machine is None or not real or dtype != "bf16":
        return None
    return machine.peak_bf16_tflops


def find_slow(nodes: Sequence[NodeSpeed]) -> tuple[SlowNode, ...]:
    """Return the nodes that are clearly slower than the others at matrix products or memory."""
    found = []
    for what, name in {"matrix products": "gemm_tflops", "memory": "memory_gb_s"}.items():
        speeds: dict[str, float] = {node.name: getattr(node, name) for node in nodes}
        # With two nodes, the faster one is the reference.
        usual = max(speeds.values()) if len(nodes) == 2 else statistics.median(speeds.values())
        slow = {node: speed for node, speed in speeds.items() if speed < SLOW_BELOW * usual}
        found += [SlowNode(node, what, speed / usual) for node, speed in slow.items()]
    return tuple(found)


FOLDER = "spr-bench"
"""In the login user's home on the head: one file per measurement, named by timestamp."""


@dataclass(frozen=True)
class BenchRequest:
    """``seconds`` per measurement. ``real``: the machines really have the type that EC2 reports."""

    seconds: float
    amx_expected: bool
    real: bool


def bench(
    context: JobContext, request: BenchRequest, show: Callable[[BenchResult], None]
) -> BenchResult:
    """Measure each node and the network between them, show the result, and keep it on the head.

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
    show(speeds)
    text = json.dumps(speeds.as_dict(), indent=1) + "\n"
    save_on_head(context.open_host(context.cluster.head), FOLDER, text, context.now)
    return speeds


def plan_bench(request: BenchRequest, stack: Stack) -> JobPlan:
    """Return a plan with the ranks, cores, and backend of a training job. Pure."""
    return JobPlan(
        kind="bench",
        module="worker.bench",
        argv=(json.dumps(asdict(BenchOptions(stack.backend, request.seconds))),),
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
    # A rank without AMX slows all others down, so it determines its node's value.
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
