"""``spr-cluster top``."""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable

from rich.console import Console

from cluster.cli.chosen_cluster import add_cluster_options, open_chosen_cloud, open_context
from cluster.console.display import make_console
from cluster.console.output import ask, has_terminal
from cluster.console.parser import SubParsers, add_command
from cluster.overview import look_up_prices
from jobs.cli.shared.chosen_job import open_overview
from jobs.top.collect import Collector, Watched
from jobs.top.live import Source, show_live
from jobs.top.screen import render
from jobs.top.snapshot import SLOWER, Snapshot

_EXAMPLES = """\
  spr-cluster top
  spr-cluster top --once                     one look, also in a script
  spr-cluster top --json >> record.jsonl     one line per look
"""
_SHORTEST_S, _LONGEST_S = 0.5, 3600.0


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "top",
        "Watch a cluster live: each node's CPU use, memory, and network; each rank's step, samples\n"
        "per second, and share of communication; the queue; the time left, cost so far, and\n"
        f"time to live. A rank is marked with ! if it computes {100 * (SLOWER - 1):.0f} % longer per "
        "step than the median\n"
        "of its job's ranks. q or Ctrl-C quits. Without a terminal, it prints one snapshot. Nothing\n"
        "is installed on the nodes, and nothing stays there.",
        _EXAMPLES,
        run=run,
    )
    add_cluster_options(parser, json=False)
    parser.add_argument(
        "--interval",
        type=_parse_interval,
        default=1.0,
        metavar="SECONDS",
        help="time between two snapshots (default: 1)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one snapshot and exit")
    form.add_argument("--json", action="store_true", help="print one snapshot as a line of JSON")


def _parse_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected seconds from {_SHORTEST_S:g} to {_LONGEST_S:g}"
        )
    return seconds


def run(args: argparse.Namespace) -> int:
    live = not (args.once or args.json) and has_terminal()
    collector = Collector(_open_cluster(args), args.interval)
    collector.start()
    try:
        return _watch(collector.latest) if live else _print(collector.first(), args)
    finally:
        collector.stop()


def _open_cluster(args: argparse.Namespace) -> Callable[[], Watched]:
    """Return a function that reads the cluster's present state from EC2."""

    def allow(question: str) -> bool:
        # Before the view takes over screen and keys.
        return threading.current_thread() is threading.main_thread() and ask(question)

    cloud = open_chosen_cloud(args)
    ctx = open_context(args, cloud, allow=allow)
    open_host = ctx.host_opener()
    types = {node.instance.instance_type for node in ctx.find_cluster().nodes}
    prices = look_up_prices(cloud, ctx.clients, types, ctx.now())
    return lambda: Watched(ctx.find_cluster(), open_overview(ctx, prices), open_host)


def _watch(source: Source) -> int:
    try:
        show_live(source, Console())
    except KeyboardInterrupt as interrupt:
        if type(interrupt) is not KeyboardInterrupt:  # SIGTERM, or the terminal was closed
            raise
    return 0


def _print(snapshot: Snapshot, args: argparse.Namespace) -> int:
    if args.json:
        print(snapshot.as_json())
    else:
        console = make_console()
        console.print(render(snapshot, console.width), no_wrap=True, crop=False)
    return 0
