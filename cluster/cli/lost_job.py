"""A job in the way of a plan: one that would lose healthy nodes, or one that has lost a node already."""

from __future__ import annotations

import dataclasses

from cluster.cli.proposal import Proposal
from cluster.nodes import Node, rank_nodes
from cluster.running_job import end_job, find_job_addresses, find_running_job, job_is_running
from infra import tags
from infra.errors import HostError
from provision.host import Host


@dataclasses.dataclass(frozen=True)
class LostJob:
    """A job that can't go on, because a node of it is gone, and the head on which it waits."""

    job: str
    head: Host

    def __str__(self) -> str:
        return f"job {self.job} has lost a node and can't go on"


def find_lost_job(proposal: Proposal) -> LostJob | None:
    """Return the job that runs although a node of it is gone.

    Only `repair` also counts a node that runs, but is unhealthy: a job may still be running on it.
    Raises :class:`UsageError` if healthy nodes would be taken from a job that can go on.
    """
    plan_input, plan = proposal.plan_input, proposal.plan
    unhealthy = plan_input.unhealthy if proposal.ctx.command == "repair" else ()
    healthy = {
        instance.id: instance.private_ip
        for instance in plan_input.found.alive
        if instance.state == "running" and instance.id not in unhealthy
    }
    taken = healthy.keys() & {id_ for action in plan.terminations for id_ in action.ids}
    nodes = rank_nodes(plan.keep, plan_input.spec.jump)
    if not (plan.changes and nodes and _may_run_jobs(nodes[0])):
        return None
    head = proposal.ctx.host_opener()(nodes[0])
    try:
        job = find_running_job(head)
        lost = job and not set(find_job_addresses(head, job)) <= set(healthy.values())
    except HostError:
        if taken:
            raise
        return None
    if taken:
        found = f"job {job} is running" if job else "no job is running"
        proposal.ctx.events.record("checked", found, resources=sorted(taken))
    if job and lost:
        return LostJob(job, head)
    if job and taken:
        raise job_is_running(job, proposal.ctx.flags)
    return None


def _may_run_jobs(head: Node) -> bool:
    return head.instance.state == "running" and tags.MESH in head.instance.tags


def end_lost_job(proposal: Proposal, lost: LostJob) -> None:
    """End a job that can't go on, so that the next one can start."""
    ctx = proposal.ctx
    with ctx.progress.phase(f"End job {lost.job}"):
        # Its ranks can't agree on a step for a checkpoint any more.
        end_job(lost.head, lost.job, 0)
    ctx.events.record("ended", str(lost))
