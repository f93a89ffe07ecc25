"""``spr-cluster status``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.display import format_seconds, wrap
from cluster.cli.parser import SubParsers, add_command
from cluster.nodes import Node, rank_nodes
from cluster.overview import Overview
from infra import tags
from infra.cloud import Cloud
from infra.instances import describe_spot_notices
from infra.inventory import describe_inventory

_EXAMPLES = """\
  spr-cluster status
  spr-cluster status --name bert --json
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "status",
        "Show a cluster as EC2's tags describe it now: nodes, addresses, cost so far, time left.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:

    cloud = open_chosen_cloud(args)
    ec2 = open_context(args, cloud).clients.ec2
    found = describe_inventory(ec2, args.name)
    nodes = rank_nodes(found.instances)
    overview = Overview(args.name, cloud.region, found, cloud.billed)
    now = datetime.now(timezone.utc)
    notices = describe_spot_notices(ec2, found.alive)
    if args.json:
        print(json.dumps(_as_dict(nodes, overview, cloud, now, notices)))
        return 0
    if not found:
        print(f"No cluster {args.name} in {cloud.name} {cloud.region} (`spr-cluster list`).")
        return 0
    for node in nodes:
        notice = notices.get(node.instance.id)
        print(_line(node) + (f"  SPOT NOTICE: {notice}" if notice else ""))
    if found.alive:
        print(_summary(overview, now))
    if notices:
        print("EC2 takes these machines back within two minutes; then: spr-cluster repair")
    print(wrap(f"Resources: {found}"))
    return 0


def _line(node: Node) -> str:
    instance = node.instance
    addresses = f"{node.private_ip:15} {node.public_ip}"
    return f"{node.name:8} {instance.state:13} {instance.instance_type:16} {instance.id:20} {addresses}"


def _as_dict(
    nodes: Sequence[Node],
    overview: Overview,
    cloud: Cloud,
    now: datetime,
    notices: Mapping[str, str],
) -> dict[str, Any]:
    stack = nodes[0].instance.tags.get(tags.STACK, "") if nodes else ""
    listed = [{**node.as_dict(), "spot_notice": notices.get(node.instance.id)} for node in nodes]
    return {**overview.as_dict(now), "cloud": cloud.name, "stack": stack, "nodes": listed}


def _summary(overview: Overview, now: datetime) -> str:
    told = overview.as_dict(now)
    stack = overview.found.alive[0].tags.get(tags.STACK, "?")
    wanted = "?" if told["wanted_nodes"] is None else told["wanted_nodes"]
    left = ""
    if told["left_s"] is not None:
        left = ", its time is over"
        if told["left_s"] > 0:
            left = f", ends itself in {format_seconds(told['left_s'])}"
    # What an interrupted `up` made, or what lost a node: both are one command from whole.
    mend = (
        f" (`spr-cluster repair --name {overview.name}`)" if told["state"] == "incomplete" else ""
    )
    return (
        f"{told['state']}{mend}: {told['nodes']} of {wanted} nodes, stack {stack}, "
        f"up for {format_seconds(told['age_s'] or 0)}{left}, ${told['usd_so_far']:.2f} so far"
    )
