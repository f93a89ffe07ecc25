"""``spr-cluster status``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from cluster.cli.chosen_cluster import ClusterRequest, open_cluster
from cluster.console.display import format_seconds, format_table
from cluster.console.output import ask, emit, wrap
from cluster.console.parser import Parser, add_request
from cluster.context import Context
from cluster.lifecycle.deadline import describe_lifetime
from cluster.lifecycle.down import has_begun
from cluster.lifecycle.host_identity import verified_by
from cluster.lifecycle.prepare import observe
from cluster.local_files import nearest_cluster, utc_now
from cluster.nodes import Node, describe_stuck, is_unconnected, rank_nodes
from cluster.overview import Overview, look_up_prices
from cluster.slurm.job_queue import NoAnswer, QueueSummary, ask_head, summarize_queue
from infra.ec2 import tags
from infra.ec2.instances import HEAD, describe_spot_notices
from infra.ec2.inventory import ALL_KINDS, describe_terminated
from infra.spec import is_baker
from infra.words import counted, spoken_time

# How long to wait for the head, after EC2's answers.
_QUEUE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class StatusRequest(ClusterRequest):
    """Show a cluster from its tags in EC2: nodes, addresses, cost so far, and time left. If the head
    answers within seconds, also show how busy the queue is.

    examples:
      spr-cluster status
      spr-cluster status --name bert --json
    """


def add_parser(parent: Parser) -> None:
    add_request(parent, "status", run, StatusRequest)


@dataclass(frozen=True)
class _View:
    """What is currently known about a cluster."""

    ctx: Context
    overview: Overview
    now: datetime
    nodes: Sequence[Node]
    notices: Mapping[str, str]
    """EC2's notices, by the IDs of spot machines that it is about to reclaim."""
    user: tuple[str, int] | None
    """The command that is changing the cluster, and its PID."""
    keys: Mapping[str, str]
    """How the host key of each machine was verified."""
    queue: QueueSummary | NoAnswer


def run(request: StatusRequest) -> int:
    ctx = open_cluster(request)
    cloud, ec2 = ctx.cloud, ctx.clients.ec2
    found = observe(ctx, ALL_KINDS, is_certain=False)
    now = utc_now()  # after EC2's answer, which corrects this machine's clock
    terminated = describe_terminated(ec2).get(ctx.name, ())
    overview = Overview(ctx.name, cloud.region, found, cloud.billed, terminated=terminated)
    prices = look_up_prices(cloud, ctx.clients, overview.types, now)
    overview = replace(overview, prices=prices)
    view = _View(
        ctx,
        overview,
        now,
        rank_nodes(found.alive or found.instances, overview.wanted_nodes or 0),
        describe_spot_notices(ec2, found.alive),
        ctx.files.user(),
        verified_by(ctx.events),
        # Only a machine with the key can log in to the head.
        ask_head(ctx, found, summarize_queue, _QUEUE_S) if ctx.files.key.exists() else NoAnswer(),
    )
    emit(request, "\n".join(_render(view)), _as_dict(view))
    has_address = any(node.public_ip for node in view.nodes)
    if has_address and ctx.files.key.exists() and not request.json:
        _follow_address(ctx)
    return 0


def _render(view: _View) -> Iterator[str]:
    ctx, overview, notices = view.ctx, view.overview, view.notices
    found = overview.found
    working = "`spr-cluster {}` (PID {}) is working on it.".format(*view.user) if view.user else ""
    if not found:
        place = f"{ctx.cloud.name} {ctx.cloud.region}{nearest_cluster(overview.name)}"
        yield f"No cluster {overview.name} in {place}. {working or 'To see all: spr-cluster list'}"
        return
    if view.nodes:
        yield format_table([_HEADER, *(_row(node, view.keys) for node in view.nodes)])
    for node in view.nodes:
        if notice := notices.get(node.instance.id):
            yield f"{node.name}: SPOT NOTICE: {notice}"
        if why := node.instance.tags.get(tags.REPLACES):
            yield wrap(f"{node.name} {why}")
    if found.alive:
        yield wrap(_summary(overview, view.now, ctx.flags))
    if isinstance(view.queue, QueueSummary):
        yield f"Queue: {view.queue}"
    elif view.queue.why and overview.state(view.now) != "expired":
        yield wrap(f"Queue: unknown, because the head did not answer: {view.queue.why}")
    if next_step := working or _next_step(view):
        yield next_step
    if notices:
        yield f"EC2 reclaims these machines within two minutes. Then: spr-cluster repair {ctx.flags}"
    yield wrap(f"Resources: {found}")


def _next_step(view: _View) -> str:
    """Return how to complete the cluster; "" if it is complete."""
    overview, flags = view.overview, view.ctx.flags
    alive, state = overview.found.alive, overview.state(view.now)
    is_unfinished = state in ("degraded", "no machines") or (alive and overview.is_idle_here)
    if is_baker(overview.name):
        return "To continue: run the same `spr-cluster bake` again" if is_unfinished else ""
    if has_begun(view.ctx) and (overview.is_owned_here or not overview.found.group):
        keep = " --keep-image" if overview.found.kept else ""
        return f"Its removal has begun. To continue: spr-cluster down {flags}{keep}"
    if why := overview.why_unreadable:
        return wrap(why)
    if alive and state == "degraded":
        is_all = len(alive) == overview.wanted_nodes  # but not connected: it was growing
        unfinished = is_all or is_unconnected(alive, overview.wanted_nodes)
        remedy = "To continue: spr-cluster up" if unfinished else "To repair: spr-cluster repair"
        return f"{remedy} {flags}"
    if overview.has_ended(view.now):
        remove = f"to remove what is left: spr-cluster down {flags}"
        return f"No machines. To create new ones: spr-cluster up {flags}; {remove}"
    return f"No machines. To continue: spr-cluster up {flags}" if state == "no machines" else ""


def _follow_address(ctx: Context) -> None:
    """Compare the SSH rule with this machine's address, and offer to fix it."""
    if (move := ctx.access.find_move()) is None:
        return
    if ask(f"{move}; allow it?"):
        ctx.access.follow(move)
    else:
        print(wrap(f"{move}. To allow it: spr-cluster up {ctx.flags}"))


_HEADER = ("NODE", "STATE", "TYPE", "INSTANCE", "PRIVATE IP", "PUBLIC IP", "HOST KEY")


def _row(node: Node, keys: Mapping[str, str]) -> tuple[str, ...]:
    instance = node.instance
    kind = instance.instance_type
    key = keys.get(instance.id, "-")
    return (node.name, instance.state, kind, instance.id, node.private_ip, node.public_ip, key)


def _as_dict(view: _View) -> dict[str, Any]:
    nodes, queue = view.nodes, view.queue
    if isinstance(queue, QueueSummary):
        busy: dict[str, Any] | None = {**asdict(queue), "unknown": None}
    else:
        busy = {"unknown": queue.why} if queue.why else None
    listed = [
        {
            **node.as_dict(),
            "spot_notice": view.notices.get(node.instance.id),
            "bought_because": node.instance.tags.get(tags.REPLACES),
            "host_key_verified_by": view.keys.get(node.instance.id),
        }
        for node in nodes
    ]
    return {
        **view.overview.as_dict(view.now),
        "cloud": view.ctx.cloud.name,
        "stack": nodes[0].instance.tags.get(tags.STACK, "") if nodes else "",
        "nodes": listed,
        "in_use_by": dict(zip(("command", "pid"), view.user, strict=True)) if view.user else None,
        "queue": busy,
    }


def _summary(overview: Overview, now: datetime, flags: str) -> str:
    """Return the cluster's state, cost, stopped machines, and remaining time, each in a line."""
    row, name = overview.as_dict(now), overview.name
    stack = overview.found.alive[0].tags.get(tags.STACK, "?")
    wanted = row["wanted_nodes"]
    running = sum(instance.state == "running" for instance in overview.found.alive)
    degraded = row["state"] == "degraded"
    nodes = f"{running if degraded else row['nodes']} of "
    nodes += "? nodes" if wanted is None else counted(wanted, "node")
    word = "in its grace period" if row["state"] == "grace" else row["state"]
    state = f"degraded: {nodes} running" if degraded else f"{word}: {nodes}"
    cost = overview.cost(now)
    source = " at on-demand prices" if cost and cost.is_most else ""
    source += f" ({row['price_source']})" if row["price_source"] else ""
    lines = [
        f"Cluster {name} is {state}, stack {stack}, up for {format_seconds(row['age_s'] or 0)}, "
        f"{cost or '?'} so far{source}"
    ]
    alive, billed = overview.found.alive, overview.billed
    if stopped := [machine for machine in alive if machine.is_stopped]:
        disk = "its disk is billed, " if billed else ""
        lines.append(
            f"Stopped: {', '.join(each.id for each in stopped)}. No timer ends a stopped machine, {disk}"
            "and it may have the only copy of results."
        )
        has_time = (row["left_s"] or 0) > 0
        if any(each.role == HEAD for each in stopped):
            lines[-1] += f" How to start the head: spr-cluster up {flags}"
        if workers := " ".join(each.id for each in stopped if each.role != HEAD):
            start = f"aws ec2 start-instances --region {overview.region} --instance-ids {workers}"
            text = f"`up` and `repair` replace a stopped worker and delete its disk; to keep it: {start}"
            lines[-1] += f" {text}" if has_time else " `down` deletes its disk."
    if overview.expires is not None and len(stopped) < len(alive):
        record = overview.record
        stuck = describe_stuck(record, alive, now, billed=billed) if record else ""
        text = f"Its time to live is over{f', but {stuck}' if stuck else ''}."
        text += f" To remove what is left: spr-cluster down {flags}"
        if row["left_s"] > 0:
            end = f"at {spoken_time(overview.expires, now)}"
            text = (
                f"Nodes are set to shut down {describe_lifetime(record, now) if record else end}; "
                "`spr-cluster verify` checks each node's timer"
            )
        elif overview.latest and now < overview.latest:
            latest = f"until {spoken_time(overview.latest, now)}"
            until = record.spoken_grace(now) if record else latest
            text = (
                f"Its time to live is over: grace {until} for what is only on the nodes. "
                f"To keep it: spr-cluster extend 2h {flags}"
            )
        lines.append(text)
    return "\n".join(lines)
