"""``spr-cluster logs``: the log of a job, of one rank, or of one element."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from cluster.console.options import option, switch
from cluster.console.output import printable, say
from cluster.console.parser import Parser, add_request
from cluster.local_files import utc_now
from infra.errors import UsageError
from infra.words import parse_duration
from jobs.cli.shared.chosen_job import JobRequest, job_argument, open_launcher
from jobs.cli.shared.job_display import render_event
from jobs.places.launcher import choose_active, choose_job, require_files
from jobs.places.queue.history import read_element, read_log
from jobs.worker.runtime.events import mark_of, parse_event


@dataclass(frozen=True, kw_only=True)
class LogsRequest(JobRequest):
    """Print a job's log, with its ranks' events as text. --rank prints what one rank wrote, from its
    own node.

    examples:
      spr-cluster logs -f
      spr-cluster logs squad-20260731-142501-k3f --rank 3
      spr-cluster logs --since 10m
    """

    job: str | None = job_argument("(default: the only queued or running job, else the newest)")
    follow: bool = switch(
        "continue until the job ends; Ctrl-C ends only this command", flags=("-f", "--follow")
    )
    rank: int | None = option("the log of this rank, from 0", parse=int, metavar="R")
    element: int | None = option(
        "the log of this element of an array, or trial of a study", parse=int, metavar="N"
    )
    since: str | None = option(
        "only the last part, such as 10m, based on event timestamps; programs of `run` have none",
        metavar="TIME",
    )
    json: bool = False


def add_parser(parent: Parser) -> None:
    add_request(parent, "logs", run_logs, LogsRequest)


def run_logs(request: LogsRequest) -> int:
    if request.element is not None and (
        request.rank is not None or request.follow or request.since
    ):
        raise UsageError("--element can't be used with --rank, --since, or --follow")
    if request.rank and request.since:
        raise UsageError("--since needs event timestamps, which only the log of rank 0 has")
    since = parse_duration(request.since, "--since") if request.since else None
    launcher = open_launcher(request)
    asked = launcher.list_jobs(), request.job, launcher.place
    # Without a name: the only active job or, if none is, the newest.
    (found,) = choose_active(*asked) or [choose_job(*asked)]
    show = request.sink or _show_line
    printer = LogPrinter(found.job, show, utc_now() - since if since else None)
    if request.element is not None:
        read_element(launcher.head, found, printer.take, request.element)
        return 0
    try:
        read_log(launcher.head, found, printer.take, request.rank, follow=request.follow)
    finally:
        launcher.head.close()
    if not printer.has_shown:
        require_files(found, launcher.flags)
    if request.rank and not printer.has_shown:
        yet = " so far" if found.is_active else ""
        say(
            f"rank {request.rank} has printed nothing{yet} (in training, only rank 0 prints progress)"
        )
    return 0


def _show_line(text: str) -> None:
    print(printable(text, sys.stdout))


class LogPrinter:
    """Shows the lines of a job's log, from the first event at or after ``since``.

    Events are shown as text; those without text are skipped.
    """

    def __init__(
        self, job: str, show: Callable[[str], object], since: datetime | None = None
    ) -> None:
        self._show = show
        self._mark = mark_of(job)
        self._since = since.timestamp() if since else 0.0
        self._has_begun = since is None
        self.has_shown = False

    def take(self, text: str) -> None:
        for line in text.split("\n"):
            self._print(line)
        sys.stdout.flush()

    def _print(self, line: str) -> None:
        event = parse_event(line, self._mark)
        if not self._has_begun:
            self._has_begun = event is not None and event.get("at", 0.0) >= self._since
        text = line if event is None else render_event(event)
        if text and self._has_begun:
            self.has_shown = True
            self._show(text)
