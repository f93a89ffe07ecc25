"""``spr-cluster events``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.cli.common import NAME_HELP, choose_cluster
from cluster.cli.parser import SubParsers, add_command, add_json_option
from cluster.cli.wrapping import wrap
from cluster.local_files import ClusterFiles, EventLog, nearest_cluster
from infra.ec2.tags import parse_time
from infra.errors import UsageError

_EXAMPLES = """\
  spr-cluster events
  spr-cluster events bert --tail 20
  spr-cluster events --json
"""
_INDENT = 17


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "events",
        "Show what commands on this machine did to a cluster, and why: plans, purchases, nodes\n"
        "replaced, zones left, and errors. The log survives `down`. Times are in UTC.",
        _EXAMPLES,
    )
    parser.add_argument("cluster", nargs="?", metavar="NAME", help=NAME_HELP)
    parser.add_argument("--name", help="the cluster's name, as for other commands")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N events")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.tail is not None and args.tail < 1:
        raise UsageError(f"--tail {args.tail}: expected a whole number from 1 on")
    name = args.cluster or choose_cluster(args)
    files = ClusterFiles.of(name)
    events = EventLog(files.events).read()
    if args.json:
        print(json.dumps({"cluster": name, "events": events[-(args.tail or 0) :]}))
        return 0
    shown = _without_begun(events)[-(args.tail or 0) :]
    if not shown:
        print(
            f"No events of cluster {name} on this machine ({files.events}){nearest_cluster(name)}."
        )
    for event in shown:
        print(wrap(_line(event), indent=_INDENT))
    return 0


def _without_begun(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Omit the beginning of every action whose end is known, too."""
    begun: dict[str, int] = {}
    ended = set()
    for number, event in enumerate(events):
        if event["event"] == "begun":
            begun[event["what"]] = number
        elif event["event"] in ("done", "failed"):
            ended.add(begun.get(event["what"]))
    return [event for number, event in enumerate(events) if number not in ended]


def _line(event: Mapping[str, Any]) -> str:
    """Return an event as one line: time, what, reason, resources."""
    reason, resources = event.get("reason"), event.get("resources")
    text = f"{_time(event['time'])}  {event['event']}: {event['what']}"
    text += f"; reason: {reason}" if reason else ""
    text += f" [{', '.join(resources)}]" if resources else ""
    return " ".join(text.split("\n"))


def _time(text: str) -> str:
    try:
        return f"{parse_time(text):%b %d %H:%M:%S}"
    except ValueError:
        return text
