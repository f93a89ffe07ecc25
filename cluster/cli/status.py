"""``spr-cluster status``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from cluster.cli.common import (
    SubParsers,
    add_cluster_options,
    add_command,
    open_chosen_cloud,
    open_context,
)
from cluster.cli.display import format_seconds
from infra import tags

if TYPE_CHECKING:
    from cluster.nodes import Node
    from infra.cloud import Cloud

_EXAMPLES = """\
  spr-cluster status
  spr-cluster status --name bert --json
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "status",
        "show a cluster's nodes, cost and time left",
        "Show a cluster as EC2's tags describe it now: nodes, addresses, cost so far, time left.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cluster.nodes import rank_nodes
    from infra.inventory import describe_cluster_names, describe_inventory

    cloud = open_chosen_cloud(args)
    ec2 = open_context(args, cloud).clients.ec2
    found = describe_inventory(ec2, args.name)
    nodes = rank_nodes(found.instances)
    others = [name for name in describe_cluster_names(ec2) if name != args.name]
    if args.json:
        told = _as_dict(nodes, cloud) if nodes else {}
        rest = {"resources": found.ids(), "other_clusters": others}
        print(json.dumps({"cluster": args.name, **told, **rest}))
        return 0
    if not found:
        print(f"No cluster {args.name} in {cloud.name} {cloud.region}.")
    for node in nodes:
        print(_line(node))
    if nodes:
        print(_summary(_as_dict(nodes, cloud)))
    if found:
        print(f"Resources: {found}")
    if others:
        print(f"Other clusters there: {', '.join(others)}")
    return 0


def _line(node: Node) -> str:
    instance = node.instance
    addresses = f"{node.private_ip:15} {node.public_ip}"
    return f"{node.name:8} {instance.state:13} {instance.instance_type:16} {instance.id:20} {addresses}"


def _as_dict(nodes: Sequence[Node], cloud: Cloud) -> dict[str, Any]:
    now = datetime.now(timezone.utc)
    head = nodes[0].instance
    spent = sum(node.instance.accrued_usd(now) for node in nodes) if cloud.billed else 0.0
    return {
        "cloud": cloud.name,
        "region": cloud.region,
        "stack": head.tags.get(tags.STACK, ""),
        "nodes": [node.as_dict() for node in nodes],
        "wanted_nodes": int(head.tags.get(tags.NODES, len(nodes))),
        "age_s": (now - head.launch_time).total_seconds(),
        "left_s": (head.expires - now).total_seconds() if head.expires else None,
        "usd_so_far": round(spent, 2),
    }


def _summary(told: dict[str, Any]) -> str:
    left = "" if told["left_s"] is None else f", ends itself in {format_seconds(told['left_s'])}"
    return (
        f"{len(told['nodes'])} of {told['wanted_nodes']} nodes, stack {told['stack']}, "
        f"up for {format_seconds(told['age_s'])}{left}, ${told['usd_so_far']:.2f} so far"
    )
