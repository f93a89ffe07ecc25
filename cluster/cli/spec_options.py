"""Options of ``up`` and ``plan`` that describe the cluster."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.cli.chosen_cluster import MADE_THERE, add_cloud_options
from infra.errors import UsageError
from infra.spec import parse_duration

_AS_GIVEN = (
    *("nodes", "stack", "max_price", "bake"),
    *("volume_gib", "volume_throughput", "volume_iops", "volume_init_rate"),
)


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, all without defaults: a cluster keeps what is not given."""
    add = parser.add_argument
    add("--name", help="the cluster's name (default: spr)")
    add_cloud_options(parser, *MADE_THERE)
    add("--nodes", type=int, help="nodes, including the head (default: unchanged, or 1)")
    add(
        "--instance-type",
        metavar="TYPES",
        help="EC2 type, or several in order of preference: a,b,c (default: r7iz.metal-16xl)",
    )
    add("--stack", metavar="NAME", help="software, see `stacks` (default: upstream)")
    add(
        "--bake",
        metavar="WAY",
        help="without an image that has the software: `head` installs it on the head and starts the "
        "workers from an image of the head; `none` installs on all nodes at once and makes the image "
        "afterwards (default: none on AWS for up to 32 nodes, else head)",
    )
    add(
        "--ttl", help="time after which each node that boots shuts down (default: 8h); see `extend`"
    )
    add("--idle-timeout", help="also shut down after this time without a job or SSH session")
    add(
        "--second-guard",
        action="store_true",
        help="also have EventBridge Scheduler terminate each machine 10 min after its deadline: one "
        "that never boots does not shut itself down (free; needs `iam-policy --second-guard`)",
    )
    add("--spot", action="store_true", help="buy spot capacity: cheaper, but EC2 can reclaim it")
    add("--max-price", type=float, metavar="USD", help="maximum price per spot machine and hour")
    add(
        "--spot-or-on-demand",
        action="store_true",
        help="like --spot, but buy on demand if there is no spot capacity",
    )
    add(
        "--no-placement-group",
        action="store_true",
        help="do not place the machines close together",
    )
    add_access_options(parser)
    add("--volume-gib", type=int, help="each node's disk in GiB (default: 100)")
    add("--volume-throughput", type=int, metavar="MIB_S", help="the disk's MiB/s (default: 125)")
    add("--volume-iops", type=int, metavar="N", help="the disk's IOPS (default: 3000)")
    add(
        "--volume-init-rate",
        type=int,
        metavar="MIB_S",
        help="load new disks from their image at 100 to 300 MiB/s, which AWS bills per GiB of the image "
        "(default: when blocks are first read)",
    )
    add("--allow-no-amx", action="store_true", help="continue if the processor has no AMX")


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the machines are reached."""
    add = parser.add_argument
    add(
        "--private",
        action="store_true",
        help="machines without public addresses, reached from inside the VPC or with --jump; to install "
        "software they need a route to a NAT gateway",
    )
    add(
        "--jump",
        metavar="WAY",
        help="how machines are reached at their private addresses: a jump host, [user@]host[:port], "
        "which OpenSSH must know already; `eice`, an EC2 Instance Connect Endpoint; or `ssm`, "
        "Session Manager",
    )
    add(
        "--ssh-cidr",
        metavar="RANGES",
        help="address ranges that may use SSH, IPv4 or IPv6: a,b,c; `auto` is this machine's current "
        "address, and the rule follows it (default: unchanged, or auto; with --private or --jump, the VPC)",
    )
    add(
        "--subnet-id",
        help="use this subnet, and so only its zone (default: each zone's default subnet, in turn)",
    )


def read_access_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given ones of these options by the spec's names."""
    given = {key: getattr(args, key) for key in ("subnet_id", "jump")}
    return {key: value for key, value in given.items() if value is not None} | (
        {"private": True} if args.private else {}
    )


def read_spec_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options by the spec's names. Raises :class:`UsageError` for invalid ones."""
    given = read_access_options(args)
    for key in _AS_GIVEN:
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
        raise UsageError("--max-price requires --spot; on-demand prices are fixed")
    if args.second_guard:
        given["second_guard"] = True
    if args.no_placement_group:
        given["placement_group"] = False
    if args.allow_no_amx:
        given["amx_required"] = False
    return given
