"""``--dry-run``: a job's placement and mpirun command, from the types of its nodes alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from cluster.cli.chosen_cluster import open_cluster
from cluster.nodes import Cluster, Node
from infra.cost.prices import table_prices
from infra.ec2.instances import Instance
from infra.errors import NoClusterError, UsageError
from infra.instance_types import TABLE_REGION, find_machine
from infra.spec import ClusterOptions, default_throughput, validate_options
from infra.words import counted
from jobs.cli.places.options import DryRunRequest, find_type, shape_of
from jobs.places.environment import warn_ignored
from jobs.places.expected import find_expected
from jobs.places.kubernetes.image import find_preloads
from jobs.places.placement import NodeShape, place_on_nodes
from jobs.places.plan import JobPaths, JobPlan, new_job_id
from jobs.places.queue.slurm import build_launch, render_command
from provision.stacks.load import DEFAULT_STACK, load_stack
from provision.stacks.stack import Stack


@dataclass(frozen=True)
class Target:
    """Nodes on which a job would run. ``shapes`` are those of their types, by the nodes' names."""

    cluster: Cluster
    stack: Stack
    shapes: Mapping[str, NodeShape]


def run_dry(
    request: DryRunRequest,
    nodes: int | None,
    now: datetime,
    build_plan: Callable[[Target], JobPlan],
    stack: str = DEFAULT_STACK,
) -> tuple[str, dict[str, object]]:
    """Return what ``--dry-run`` prints, as text and as JSON. EC2 is asked only for an existing cluster.

    ``stack`` is the default of a cluster that does not exist.
    """
    if request.instance_type:
        target = imagine(request.instance_type, nodes or 1, request.stack or stack, now)
    else:
        target = _find(request)
    return preview(build_plan(target), target, now)


def imagine(type_name: str, nodes: int, stack: str, now: datetime) -> Target:
    """Return new nodes of a type in the table.

    Raises :class:`UsageError` for another type, or more nodes than a cluster can have.
    """
    machine = find_type(type_name)
    validate_options(nodes=nodes)
    names = [f"node{rank}" for rank in range(nodes)]
    every = tuple(
        Node(rank, Instance("", "", "", name, "", rank, now, machine.name, "", {}))
        for rank, name in enumerate(names)
    )
    shapes = dict.fromkeys(names, shape_of(machine))
    options = ClusterOptions(volume_throughput=default_throughput([machine.name])).model_dump()
    return Target(Cluster("spr", every, nodes, options=options), load_stack(stack), shapes)


def _find(request: DryRunRequest) -> Target:
    try:
        context = open_cluster(request)
        cluster = context.find_cluster()
    except NoClusterError as error:
        error.hint = "; ".join(filter(None, ("--instance-type TYPE needs no cluster", error.hint)))
        raise
    machines = {node.name: node.instance.instance_type for node in cluster.nodes}
    types = {name: find_machine(context.clients.ec2, name) for name in {*machines.values()}}
    unknown = [name for name, machine in types.items() if machine is None]
    if unknown:
        raise UsageError(f"EC2 does not describe {', '.join(unknown)} in {context.cloud.region}")
    shapes = {node: shape_of(found) for node, name in machines.items() if (found := types[name])}
    return Target(cluster, load_stack(cluster.stack, locked=False), shapes)


def preview(plan: JobPlan, target: Target, now: datetime) -> tuple[str, dict[str, object]]:
    """Return a job's placement and mpirun command. Raises :class:`UsageError` if the nodes don't fit."""
    cluster, stack = target.cluster, target.stack
    preload = find_preloads(stack)._replace(tcmalloc=None)
    placement = place_on_nodes(target.shapes, plan.spec.resources, plan.backend, preload)
    paths = JobPaths(new_job_id(plan.kind, now))
    launch = build_launch(plan, placement, paths, cluster, stack)
    mpirun = render_command(launch, cluster.head.private_ip)
    used = cluster.first(plan.spec.resources.nodes).nodes
    types = sorted({node.instance.instance_type for node in used})
    warnings = (*placement.warnings, *warn_ignored(stack, placement))
    ranks = counted(placement.nproc_per_node, "rank")
    resources, whole = plan.spec.resources, target.shapes[cluster.head.name]
    part = f"{resources.cores} of {counted(whole.cores, 'core')}: " if resources.cores else ""
    share = resources.share_of(whole.cores)
    price = table_prices(TABLE_REGION, types).listed(types, cluster.options)
    usd = price.usd * len(used) * share if price else None
    words = shlex.join(plan.command or ("python", "-m", plan.module, *plan.argv))
    expected = find_expected(words, len(used), resources.cores, used[0].instance.instance_type, {})
    cost = [f"about ${usd:.2f} an hour on demand ({price.source})"] if price and usd else []
    cost += [expected.describe(usd)] if expected.seconds else []
    workers = f" + {placement.ccl_workers} for oneCCL" if placement.ccl_workers else ""
    lines = [
        f"{counted(len(used), 'node')} ({', '.join(types)}), each with {part}{ranks} of "
        f"{counted(placement.omp_threads, 'thread')}{workers}; backend {plan.backend}, stack {stack.name}",
        *cost,
        *([f"The job costs {share:.1%} of its nodes' price."] if resources.cores else []),
        *(f"warning: {warning}" for warning in warnings),
        f"$ {mpirun}",
        "Nothing was sent. The job adds the nodes' network interface and the path of tcmalloc.",
    ]
    return "\n".join(lines), {
        "nodes": len(used),
        "cores": resources.cores,
        "node_share": share,
        "instance_types": types,
        "stack": stack.name,
        "backend": plan.backend,
        "nproc_per_node": placement.nproc_per_node,
        "omp_threads": placement.omp_threads,
        "ccl_workers": placement.ccl_workers,
        "usd_per_hour": usd and round(usd, 4),
        "expected": expected.as_dict(usd),
        "warnings": [*warnings],
        "mpirun": mpirun,
    }
