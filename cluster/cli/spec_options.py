"""The options of ``up`` and ``plan`` that say what a cluster should be."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.cli.common import add_cluster_options
from infra.errors import UsageError
from infra.spec import parse_duration


def add_wishes(parser: argparse.ArgumentParser) -> None:
    """Every option has no default: what is not given stays as the cluster has it."""
    add_cluster_options(parser)
    add = parser.add_argument
    add("--nodes", type=int, help="nodes, the head included (default: as it is, else 1)")
    add(
        "--instance-type",
        metavar="TYPES",
        help="EC2 type, or several in the order of preference: a,b,c (default: r7iz.metal-16xl)",
    )
    add(
        "--stack",
        metavar="NAME",
        help="software, see `stacks` (default: intel on AWS, upstream on the embedded cloud)",
    )
    add(
        "--bake",
        metavar="WAY",
        help="where no image has the software: `head` installs the head and starts the others from "
        "an image of it; `none` installs all nodes at once, and makes the image afterwards "
        "(default: none on AWS up to 32 nodes, else head)",
    )
    add("--ttl", help="the nodes end themselves after this time (default: 8h); see `extend`")
    add("--idle-timeout", help="... and after this time without a job or an SSH session")
    add("--spot", action="store_true", help="buy on the spot market: cheaper, can be taken away")
    add("--max-price", type=float, metavar="USD", help="most to pay per spot machine and hour")
    add(
        "--spot-or-on-demand",
        action="store_true",
        help="like --spot, but buy on demand where spot has no room",
    )
    add(
        "--no-placement-group",
        action="store_true",
        help="do not ask for machines close to one another",
    )
    add("--ssh-cidr", help="addresses that may use SSH (default: this machine's own, as /32)")
    add("--subnet-id", help="a subnet (default: one of the default VPC)")
    add("--volume-gib", type=int, help="each node's disk in GiB (default: 100)")
    add("--allow-no-amx", action="store_true", help="go on where the processor has no AMX")


def read_wishes(args: argparse.Namespace) -> dict[str, Any]:
    """What the user gave, and nothing else, in the words of the spec.

    Raises :class:`UsageError` for values that can't be meant.
    """

    given: dict[str, Any] = {}
    for key in ("nodes", "stack", "subnet_id", "volume_gib", "max_price", "bake"):
        if getattr(args, key) is not None:
            given[key] = getattr(args, key)
    for key in ("ttl", "idle_timeout"):
        if getattr(args, key) is not None:
            given[key] = parse_duration(getattr(args, key), "--" + key.replace("_", "-"))
    if args.instance_type is not None:
        names = args.instance_type.split(",")
        given["instance_types"] = tuple(name.strip() for name in names if name.strip())
    if args.spot or args.spot_or_on_demand:
        given["spot"], given["on_demand_allowed"] = True, args.spot_or_on_demand
    elif args.max_price is not None:
        raise UsageError("--max-price is for --spot machines; on demand has one price")
    if args.no_placement_group:
        given["placement_group"] = False
    if args.allow_no_amx:
        given["amx_required"] = False
    return given
