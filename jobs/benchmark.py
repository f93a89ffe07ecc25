"""``bench``: measure the nodes of a cluster, and keep the figures on its head."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jobs
from cluster.nodes import Cluster, HostOpener, Node
from infra.errors import JobError, UsageError
from infra.progress import Progress
from infra.tags import render_time
from infra.words import counted
from jobs import launch
from jobs.bench.options import BenchOptions
from jobs.mpirun import LaunchCommand, build_launch_command
from jobs.placement import plan_placement
from jobs.request import require_able_stack
from jobs.running import (
    Event,
    Output,
    ask_facts,
    explain,
    private_addresses,
    require_all_nodes,
    run_command,
)
from jobs.spec import JobPaths, JobSpec, PlacementWish, new_job_id
from jobs.speeds import NodeSpeed, Speeds, find_peak, read_speeds
from provision.facts import HostFacts
from provision.host import Host
from provision.stacks import Stack
from provision.stacks.oneccl import environment_lookup
from provision.stacks.stack import BINDING

FOLDER = "spr-bench"
"""Below the login user's home on the head: a file per measurement, named by its time."""


@dataclass(frozen=True)
class BenchRequest:
    """``seconds`` for each measurement. ``real``: the machines are what their type's name says."""

    seconds: float
    placement: PlacementWish
    amx_expected: bool
    real: bool


def bench(
    cluster: Cluster,
    stack: Stack,
    open_host: HostOpener,
    request: BenchRequest,
    *,
    progress: Progress,
    now: datetime,
    on_log: Callable[[str], None],
) -> Speeds:
    """Measure all nodes at once, then all together. Raises :class:`JobError` where that failed."""
    require_able_stack(stack, "bench")
    paths = JobPaths(new_job_id("bench", now))
    head = open_host(cluster.head)
    require_all_nodes(cluster)
    with progress.phase(f"Prepare {paths.job_id}"):
        launch.require_idle(head)
        facts = ask_facts(cluster, open_host)
        command = plan_bench(cluster, stack, facts, request, paths)
        launch.place_files(head, paths, bench_files())
    found: list[Event] = []
    output = Output(lambda event: _show(event, found, progress, on_log), on_log)
    with progress.phase(f"Measure {counted(len(cluster.nodes), 'node')}"):
        exit_code = run_command(head, command, paths, output)
    if exit_code != 0 or not found:
        raise explain(exit_code, output, f"the whole log is {paths.log} on node0")
    speeds = read_result(found[-1], cluster, stack, request, now)
    keep_speeds(head, speeds, now)
    return speeds


def _show(
    event: Event, found: list[Event], progress: Progress, on_log: Callable[[str], None]
) -> None:
    if event["event"] == "phase":
        progress.note(event["name"])
    elif event["event"] == "note":
        on_log(event["text"])
    elif event["event"] == "result":
        found.append(event)


def plan_bench(
    cluster: Cluster,
    stack: Stack,
    facts: Mapping[str, HostFacts],
    request: BenchRequest,
    paths: JobPaths,
) -> LaunchCommand:
    """The mpirun line: the ranks, cores and backend that a training job would have."""
    placement = plan_placement(facts, private_addresses(cluster), request.placement, stack.backend)
    job = JobSpec(
        id=paths.job_id,
        module="jobs.bench",
        argv=tuple(BenchOptions(stack.backend, request.seconds).to_argv()),
        nnodes=len(cluster.nodes),
        nproc_per_node=placement.ranks.nproc_per_node,
        backend=stack.backend,
        env=dict(stack.environment),
        ccl_lookup=environment_lookup(stack.pin(BINDING) or "1.12"),
    )
    return build_launch_command(job, placement, paths, cluster.head.private_ip)


def bench_files() -> Mapping[str, Path | bytes]:
    """What the nodes need: the code that measures, and that of the ranks, as one package."""
    root = Path(jobs.__file__).parent
    sources = [
        root / "__init__.py",
        *sorted(root.glob("bench/*.py")),
        *sorted(root.glob("squad/*.py")),
    ]
    return {f"code/jobs/{source.relative_to(root)}": source for source in sources}


def read_result(
    result: Mapping[str, Any], cluster: Cluster, stack: Stack, request: BenchRequest, now: datetime
) -> Speeds:
    """The ranks' figures by node. mpirun fills the nodes in the hostfile's order, ours."""
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
    return Speeds(
        when=render_time(now),
        cluster=cluster.name,
        stack=stack.name,
        backend=result["backend"],
        dtype=dtype,
        dtype_reason=result["dtype_reason"],
        matrix_size=result["matrix_size"],
        amx_expected=request.amx_expected,
        nodes=tuple(nodes),
        all_reduce=tuple(result["all_reduce"]),
        torch=result["torch"],
    )


def _as_node(node: Node, ranks: Sequence[Mapping[str, Any]], peak: float | None) -> NodeSpeed:
    # The rank that says the least speaks for its node: one without AMX slows all others down.
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


def keep_speeds(head: Host, speeds: Speeds, now: datetime) -> None:
    """Keep a measurement with the cluster, on its head."""
    home = JobPaths("").home
    head.run(f"mkdir -p ~/{FOLDER}")
    content = json.dumps(speeds.as_dict(), indent=1) + "\n"
    head.put(content.encode(), f"{home}/{FOLDER}/{now:%Y%m%d-%H%M%S}.json", 0o644)


def last_speeds(head: Host, name: str) -> Speeds:
    """The last measurement that was kept; raises :class:`UsageError` where there is none."""
    text = head.run(f'cat "$(ls -1 ~/{FOLDER}/*.json 2>/dev/null | tail -n 1)" 2>/dev/null || true')
    if not text.stdout.strip():
        raise UsageError(
            f"nothing is kept on the head of cluster {name!r}: it was not measured yet",
            hint=f"spr-cluster bench --name {name}",
        )
    try:
        return read_speeds(json.loads(text.stdout))
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"the last file in ~/{FOLDER} of the head can't be read: {error!r}"
        ) from None
