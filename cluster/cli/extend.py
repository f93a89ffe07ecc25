"""``spr-cluster extend``."""

from __future__ import annotations

import argparse
import functools
import json
from datetime import timedelta

from cluster.cli.accounts import confirm_owner
from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.lifecycle.deadline import extend
from infra.ec2.tags import render_time
from infra.errors import UsageError
from infra.spec import LONGEST_TTL
from infra.words import parse_duration, spoken_time

_EXAMPLES = """\
  spr-cluster extend 2h
  spr-cluster extend 30m --name bert
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "extend",
        "Extend the time to live of a cluster, on its nodes and in its tags.",
        _EXAMPLES,
    )
    parser.add_argument("time", help="how much longer: 90m, 2h, 1d")
    add_cluster_options(parser)
    parser.add_argument(
        "--yes",
        "-y",
        action="store_true",
        help="with --name: do not ask, even if somebody else made the cluster",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    more = parse_duration(args.time, "extend")
    if not timedelta(minutes=1) <= more <= LONGEST_TTL:
        raise UsageError(f"extend {args.time}: expected from 1m to 30d")
    progress = make_progress()
    cloud = open_chosen_cloud(args, progress=progress)
    ctx = open_context(args, cloud, progress=progress)
    with ctx.files.lock(args.verb):
        record = extend(ctx, args.name, more, functools.partial(confirm_owner, ctx, args))
    if args.json:
        print(json.dumps({"cluster": args.name, "expires": render_time(record.expires)}))
    else:
        until = spoken_time(record.expires, ctx.now())
        print(f"Nodes of cluster {args.name} shut down automatically at {until}")
    return 0
