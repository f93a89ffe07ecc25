"""``spr-cluster logs``."""

from __future__ import annotations

import argparse
from datetime import datetime

from cluster.cli.common import add_cluster_options
from cluster.cli.parser import SubParsers, add_command
from infra.spec import parse_duration
from jobs.cli.chosen_job import add_job_argument, open_job
from jobs.cli.job_display import render_event
from jobs.launch.history import choose_job
from jobs.launch.logs import read_log
from jobs.worker.runtime.events import parse_event
from provision.host import LineSink

_EXAMPLES = """\
  spr-cluster logs -f
  spr-cluster logs squad-20260731-142501-k3f --rank 3
  spr-cluster logs --since 10m
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "logs",
        "Print the log of a job, with the events that its ranks report as text. --rank prints what one\n"
        "rank wrote, from its own node.",
        _EXAMPLES,
    )
    add_job_argument(parser, "(default: the newest one)")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on until the job ends; Ctrl-C ends only this",
    )
    parser.add_argument("--rank", type=int, metavar="R", help="the log of this rank, from 0")
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="only what was written in the last, for example, 10m or 2h; by the times that the "
        "ranks' events have, so not for programs of `run`",
    )
    add_cluster_options(parser, json=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    since = parse_duration(args.since, "--since") if args.since else None
    ctx, head, found = open_job(args, choose_job)
    sink = only_since(ctx.now() - since, show) if since else show
    try:
        read_log(head, found, sink, args.rank, follow=args.follow)
    finally:
        head.close()
    return 0


def show(line: str) -> None:
    """Print a line of a log; an event as text, or not at all if it has none."""
    event = parse_event(line)
    text = line if event is None else render_event(event)
    if text:
        print(text, flush=True)


def only_since(since: datetime, on_line: LineSink) -> LineSink:
    """Return a sink that passes on the lines from the first event at or after a time."""
    begun = False

    def pass_on(line: str) -> None:
        nonlocal begun
        event = None if begun else parse_event(line)
        begun = begun or bool(event and float(event.get("at", 0)) >= since.timestamp())
        if begun:
            on_line(line)

    return pass_on
