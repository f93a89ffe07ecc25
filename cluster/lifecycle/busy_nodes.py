"""Protects nodes that a job is using from plans that would remove or rename them."""

from __future__ import annotations

from cluster.context import Context
from cluster.nodes import rank_nodes
from cluster.slurm.job_queue import how_to_end, list_queue
from infra.ec2 import tags
from infra.errors import HostError, UsageError
from infra.plan.actions import Plan
from infra.plan.planner import PlanInput
from provision.host import Host


def check_busy_nodes(ctx: Context, plan_input: PlanInput, plan: Plan) -> None:
    """Raise :class:`UsageError` if the plan would take nodes from a running job, or rename them.

    A job that has lost a node does not count: Slurm ends or requeues it. Only `repair` treats an
    unhealthy node as lost; other commands assume that a job may still be running on it.
    """
    unhealthy = plan_input.unhealthy if ctx.command == "repair" else ()
    healthy = {
        instance.id: instance.private_ip
        for instance in plan_input.found.alive
        if instance.state == "running" and instance.id not in unhealthy
    }
    taken = healthy.keys() & {id_ for action in plan.terminations for id_ in action.ids}
    nodes = rank_nodes(plan.keep, plan_input.spec.nodes, plan_input.spec.jump)
    if not (plan.changes and nodes):
        return
    head = nodes[0].instance
    if head.state != "running" or tags.MESH not in head.tags:
        return
    try:
        busy = _find_busy(ctx.host_opener()(nodes[0]))
    except HostError:
        if taken:
            raise
        return
    kept = {node.private_ip: node.name for node in nodes}
    removed = {healthy[id_] for id_ in taken}
    if taken:
        jobs = sorted({job for job, _ in busy.values()})
        found = f"{' and '.join(jobs)} running" if jobs else "no job is running"
        ctx.events.record("checked", found, resources=sorted(taken))
    for address, (job, name) in busy.items():
        if address in removed or kept.get(address, name) != name:
            end = how_to_end(job, ctx.flags)
            raise UsageError(
                f"job {job} is still running on this cluster",
                hint=f"wait for it to end, or save a checkpoint and end it: {end}",
            )


def _find_busy(head: Host) -> dict[str, tuple[str, str]]:
    """Return the running job and the name of each node in use, by the node's private address."""
    running = [job for job in list_queue(head) if not job.is_waiting]
    if not running:
        return {}
    text = head.run("# listing the nodes\necho; sinfo --noheader --Node --format='%N %o'").stdout
    # The shell's startup files may print other lines, and text without a newline.
    lines = (line.split() for line in text.splitlines())
    addresses = dict(words for words in lines if len(words) == 2)
    try:
        return {addresses[node]: (job.name, node) for job in running for node in job.nodes}
    except KeyError as node:
        raise HostError(head.name, f"Slurm does not list {node}, which a job is using") from None
