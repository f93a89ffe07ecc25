"""``spr-cluster logs``."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from typing import Any

from cluster.cli.parser import SubParsers, add_command
from cluster.cli.wrapping import printable
from cluster.local_files import utc_now
from infra.words import parse_duration
from jobs.cli.chosen_job import add_job_options, open_launcher
from jobs.cli.job_display import render_event
from jobs.launchers.launcher import choose_shown
from jobs.worker.runtime.events import mark_of, parse_event

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
        "rank wrote, from its own node; on Kubernetes, its pod.",
        _EXAMPLES,
    )
    text = "(default: the only one that runs or waits, or else the newest)"
    add_job_options(parser, text, json=False)
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    since = parse_duration(args.since, "--since") if args.since else None
    launcher = open_launcher(args)
    found = choose_shown(launcher.list_jobs(), args.job, launcher.place)
    printer = LogPrinter(found.job, utc_now() - since if since else None)
    launcher.read_log(found, printer.take, args.rank, follow=args.follow)
    return 0


class LogPrinter:
    """Prints the lines of a job's log, from the first event at or after ``since``.

    An event is printed as text, or not at all if it has none.
    """

    def __init__(self, job: str, since: datetime | None = None) -> None:
        self._mark, self._is_marked = mark_of(job), False
        self._since = since.timestamp() if since else 0.0
        self._has_begun = since is None

    def take(self, text: str) -> None:
        for line in text.split("\n"):
            self._print(line)
        sys.stdout.flush()

    def _print(self, line: str) -> None:
        event = self._parse(line)
        if not self._has_begun:
            self._has_begun = event is not None and event.get("at", 0.0) >= self._since
        text = line if event is None else render_event(event)
        if text and self._has_begun:
            print(printable(text, sys.stdout))

    def _parse(self, line: str) -> dict[str, Any] | None:
        event = parse_event(line, self._mark)
        self._is_marked = self._is_marked or event is not None
        # The events of earlier versions have no mark.
        return event if self._is_marked else parse_event(line)
