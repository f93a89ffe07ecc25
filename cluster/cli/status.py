"""``spr-cluster status``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from cluster.cli.common import add_cluster_options, ask, open_chosen_cloud, open_context
from cluster.cli.display import format_seconds, format_table
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.wrapping import wrap
from cluster.context import Context
from cluster.job_queue import NoAnswer, QueueSummary, ask_head, summarize_queue
from cluster.lifecycle.host_identity import verified_by
from cluster.local_files import nearest_cluster, utc_now
from cluster.nodes import Node, is_unconnected, rank_nodes
from cluster.overview import Overview, look_up_prices, show_cost
from infra.aws.cloud import Cloud
from infra.ec2 import tags
from infra.ec2.instances import describe_spot_notices
from infra.ec2.inventory import Inventory, describe_inventory
from infra.words import counted, spoken_time

# What the question to the head may add to EC2's answers.
_QUEUE_S = 3.0
_EXAMPLES = """\
  spr-cluster status
  spr-cluster status --name bert --json
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "status",
        "Show a cluster from its tags in EC2: nodes, addresses, cost so far, and time left. If the head\n"
        "answers within seconds, also how busy the queue is.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    cloud = open_chosen_cloud(args)
    ctx = open_context(args, cloud)
    ec2 = ctx.clients.ec2
    found = describe_inventory(ec2, args.name)
    nodes = rank_nodes(found.instances)
    now = utc_now()
    prices = look_up_prices(cloud, ctx.clients, (i.instance_type for i in found.alive), now)
    overview = Overview(args.name, cloud.region, found, cloud.billed, prices)
    notices = describe_spot_notices(ec2, found.alive)
    user = ctx.files.user()
    keys = verified_by(ctx.events)
    queue = _ask_queue(ctx, found)
    if args.json:
        shown = _as_dict(nodes, overview, cloud, now, notices, user, keys)
        print(json.dumps({**shown, "queue": _queue_as_dict(queue)}))
        return 0
    working = "`spr-cluster {}` (PID {}) is working on it.".format(*user) if user else ""
    if not found:
        print(
            f"No cluster {args.name} in {cloud.name} {cloud.region}{nearest_cluster(args.name)}. "
            f"{working or 'To see all: spr-cluster list'}"
        )
        return 0
    if nodes:
        print(format_table([_HEADER, *(_row(node, keys) for node in nodes)]))
    for node in nodes:
        if notice := notices.get(node.instance.id):
            print(f"{node.name}: SPOT NOTICE: {notice}")
        if why := node.instance.tags.get(tags.REPLACES):
            print(wrap(f"{node.name} {why}"))
    if found.alive:
        print(wrap(_summary(overview, now, ctx.flags)))
    if isinstance(queue, QueueSummary):
        print(f"Queue: {queue}")
    elif queue.why:
        print(wrap(f"Queue: the head does not say how busy it is: {queue.why}"))
    if working:
        print(working)
    elif found.alive and overview.state(now) == "degraded":
        is_all = len(found.alive) == overview.wanted_nodes  # but not connected: it was growing
        unfinished = is_all or is_unconnected(found.alive, overview.wanted_nodes)
        remedy = "To continue: spr-cluster up" if unfinished else "To repair: spr-cluster repair"
        print(f"{remedy} {ctx.flags}")
    elif overview.state(now) == "no machines":
        print(f"No machines. To continue: spr-cluster up {ctx.flags}")
    if notices:
        print(
            f"EC2 reclaims these machines within two minutes. Then: spr-cluster repair {ctx.flags}"
        )
    print(wrap(f"Resources: {found}"))
    if any(node.public_ip for node in nodes) and ctx.files.key.exists():
        _follow_address(ctx)
    return 0


def _ask_queue(ctx: Context, found: Inventory) -> QueueSummary | NoAnswer:
    """Ask the head, if this machine can enter it."""
    if not ctx.files.key.exists():
        return NoAnswer()
    return ask_head(ctx, found, summarize_queue, _QUEUE_S)


def _queue_as_dict(queue: QueueSummary | NoAnswer) -> dict[str, Any] | None:
    if isinstance(queue, QueueSummary):
        return {**asdict(queue), "unknown": None}
    return {"unknown": queue.why} if queue.why else None


def _follow_address(ctx: Context) -> None:
    """Compare the SSH rule with this machine's address, and offer to mend it."""
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


def _as_dict(
    nodes: Sequence[Node],
    overview: Overview,
    cloud: Cloud,
    now: datetime,
    notices: Mapping[str, str],
    user: tuple[str, int] | None,
    keys: Mapping[str, str],
) -> dict[str, Any]:
    stack = nodes[0].instance.tags.get(tags.STACK, "") if nodes else ""
    listed = [
        {
            **node.as_dict(),
            "spot_notice": notices.get(node.instance.id),
            "bought_because": node.instance.tags.get(tags.REPLACES),
            "host_key_verified_by": keys.get(node.instance.id),
        }
        for node in nodes
    ]
    in_use_by = dict(zip(("command", "pid"), user, strict=True)) if user else None
    more = {"cloud": cloud.name, "stack": stack, "nodes": listed, "in_use_by": in_use_by}
    return {**overview.as_dict(now), **more}


def _source(row: Mapping[str, Any]) -> str:
    """Return where the prices are from, except for a cost of zero."""
    return f" ({row['price_source']})" if row["price_source"] else ""


def _summary(overview: Overview, now: datetime, flags: str) -> str:
    """Return the cluster's state, cost, and remaining time in two lines at most."""
    row, name = overview.as_dict(now), overview.name
    stack = overview.found.alive[0].tags.get(tags.STACK, "?")
    wanted = row["wanted_nodes"]
    running = sum(instance.state == "running" for instance in overview.found.alive)
    degraded = row["state"] == "degraded"
    nodes = f"{running if degraded else row['nodes']} of "
    nodes += "? nodes" if wanted is None else counted(wanted, "node")
    state = f"degraded: {nodes} running" if degraded else f"{row['state']}: {nodes}"
    lines = [
        f"Cluster {name} is {state}, stack {stack}, up for {format_seconds(row['age_s'] or 0)}, "
        f"{show_cost(row)} so far{_source(row)}"
    ]
    if overview.expires is not None:
        text = f"Its time to live is over. To remove what is left: spr-cluster down {flags}"
        if row["left_s"] > 0:
            text = (
                f"Nodes are set to shut down at {spoken_time(overview.expires, now)}; "
                "`spr-cluster verify` asks each node's timer"
            )
        lines.append(text)
    return "\n".join(lines)
