"""``spr-cluster top``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.console import Console

from cluster.cli.chosen_cluster import ClusterRequest, open_cluster
from cluster.console.display import make_console
from cluster.console.options import option, parse_number, switch
from cluster.console.output import ask, emit, has_terminal
from cluster.console.parser import Parser, add_request
from cluster.overview import look_up_prices
from jobs.cli.shared.chosen_job import open_overview
from jobs.top.collect import Collector, Watched
from jobs.top.live import Source, show_live
from jobs.top.screen import render
from jobs.top.snapshot import Snapshot

_SHORTEST_S, _LONGEST_S = 0.5, 3600.0


def _parse_interval(text: str) -> float:
    expected = f"seconds from {_SHORTEST_S:g} to {_LONGEST_S:g}"
    return parse_number(text, lambda found: _SHORTEST_S <= found <= _LONGEST_S, expected)


@dataclass(frozen=True, kw_only=True)
class TopRequest(ClusterRequest):
    """Watch a cluster live: each node's CPU use, memory, and network; each rank's step, samples
    per second, and share of communication; the queue; the time left, cost so far, and
    time to live. A rank is marked with ! if it computes 20 % longer per step than the median
    of its job's ranks. q or Ctrl-C quits. Without a terminal, it prints one snapshot. Nothing
    is installed on the nodes, and nothing stays there.

    examples:
      spr-cluster top
      spr-cluster top --once                     one look, also in a script
      spr-cluster top --json >> record.jsonl     one line per look
    """

    interval: float = option(
        "time between two snapshots (default: 1)", 1.0, parse=_parse_interval, metavar="SECONDS"
    )
    once: bool = switch("print one snapshot and exit", excludes="form")
    json: bool = switch("print one snapshot as a line of JSON", excludes="form")


def add_parser(parent: Parser) -> None:
    add_request(parent, "top", run, TopRequest)


def run(request: TopRequest) -> int:
    live = not (request.once or request.json) and has_terminal()
    collector = Collector(_open_cluster(request), request.interval)
    collector.start()
    try:
        return _watch(collector.latest) if live else _print(request, collector.first())
    finally:
        collector.stop()


def _open_cluster(request: TopRequest) -> Callable[[], Watched]:
    """Return a function that reads the cluster's present state from EC2."""

    def allow(question: str) -> bool:
        # Before the view takes over screen and keys.
        return threading.current_thread() is threading.main_thread() and ask(question)

    ctx = open_cluster(request, allow=allow)
    open_host = ctx.host_opener()
    types = {node.instance.instance_type for node in ctx.find_cluster().nodes}
    prices = look_up_prices(ctx.cloud, ctx.clients, types, ctx.now())
    return lambda: Watched(ctx.find_cluster(), open_overview(ctx, prices), open_host)


def _watch(source: Source) -> int:
    try:
        show_live(source, Console())
    except KeyboardInterrupt as interrupt:
        if type(interrupt) is not KeyboardInterrupt:  # SIGTERM, or the terminal was closed
            raise
    return 0


def _print(request: TopRequest, snapshot: Snapshot) -> int:
    if request.json:
        emit(request, "", asdict(snapshot))
    else:
        console = make_console()
        console.print(render(snapshot, console.width), no_wrap=True, crop=False)
    return 0
