"""``spr-cluster extend``."""

from __future__ import annotations

import argparse
import functools
from datetime import timedelta

from cluster.cli.chosen_cluster import (
    add_cluster_options,
    confirm_owner,
    open_cluster,
)
from cluster.console.display import make_progress
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command, add_yes_option
from cluster.lifecycle.extend import extend
from infra.errors import UsageError
from infra.spec import LONGEST_TTL, parse_duration
from infra.tags import render_time
from infra.words import spoken_time

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
        run=run,
    )
    parser.add_argument("time", help="how much longer: 90m, 2h, 1d")
    add_cluster_options(parser)
    text = "with --name: do not ask, even if somebody else made the cluster"
    add_yes_option(parser, text)


def run(args: argparse.Namespace) -> int:
    more = parse_duration(args.time, "extend")
    if not timedelta(minutes=1) <= more <= LONGEST_TTL:
        raise UsageError(f"extend {args.time}: expected from 1m to 30d")
    ctx = open_cluster(args, make_progress())
    with ctx.files.lock(args.verb):
        record = extend(ctx, args.name, more, functools.partial(confirm_owner, ctx, args))
    until = spoken_time(record.expires, ctx.now())
    text = f"Nodes of cluster {args.name} shut down automatically at {until}"
    emit(args, text, {"cluster": args.name, "expires": render_time(record.expires)})
    return 0
