"""``spr-cluster events``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from cluster.cli.chosen_cluster import (
    ClusterRequest,
    choose_cluster,
    open_chosen_cloud,
    open_cluster,
)
from cluster.console.options import option
from cluster.console.output import emit, say, wrap
from cluster.console.parser import Parser, add_request
from cluster.local_files import (
    ClusterFiles,
    EventLog,
    nearest_cluster,
    remembered_cloud,
    utc_now,
)
from cluster.slurm.job_queue import NoAnswer, ask_head
from infra.aws.clients import connect
from infra.ec2 import tags
from infra.ec2.inventory import describe_inventory, describe_terminated
from infra.errors import SprError, UsageError
from infra.files import parse_object

_INDENT = 17
_HEAD_S = 3.0
_READ = "cat ~/spr-jobs/.events.jsonl 2>/dev/null || true"


@dataclass(frozen=True, kw_only=True)
class EventsRequest(ClusterRequest):
    """Show what commands on this machine did to a cluster, and why; the log survives `down`. Also
    lists machines that another computer bought, and what the nodes did by themselves if the head
    answers. Times are in UTC.

    examples:
      spr-cluster events
      spr-cluster events --name bert --tail 20
      spr-cluster events --json
    """

    tail: int | None = option("only the last N events", parse=int, metavar="N")


def add_parser(parent: Parser) -> None:
    add_request(parent, "events", run, EventsRequest)


def run(request: EventsRequest) -> int:
    if request.tail is not None and request.tail < 1:
        raise UsageError(f"--tail {request.tail}: expected a whole number of at least 1")
    name = choose_cluster(request)
    request = replace(request, name=name)
    files = ClusterFiles.of(name)
    events: list[Mapping[str, Any]] = [*EventLog(files.events).read()]
    if request.region or request.cloud or (remembered_cloud(name) or ("local",))[0] == "aws":
        try:
            events += _bought_elsewhere(request, name, events)
        except SprError as error:
            say(f"machines that another computer bought are not listed: {error}")
    bought = [str(event["time"]) for event in events if event["event"] == "bought"]
    events += _on_nodes(request, files, bought=max(bought, default=""))
    # Times begin with digits, so an unknown one comes last.
    events.sort(key=lambda event: str(event["time"] or "unknown"))
    last = slice(-(request.tail or 0), None)
    none = f"No events of cluster {name} on this machine ({files.events}){nearest_cluster(name)}."

    def render() -> str:
        lines = [wrap(_line(event), indent=_INDENT) for event in _without_begun(events)[last]]
        return "\n".join(lines) or none

    emit(request, render, {"cluster": name, "events": events[last]})
    return 0


def _on_nodes(
    request: ClusterRequest, files: ClusterFiles, *, bought: str
) -> list[Mapping[str, Any]]:
    """Return what the nodes did by themselves; nothing if there is no head, or if it does not answer.

    ``bought`` is when the last of them was; "" if none was.
    """
    if not files.key.exists():
        return []
    try:
        ctx = open_cluster(request)
        found = describe_inventory(ctx.clients.ec2, ctx.name)
        if found.record and not found.alive and bought >= tags.render_time(found.record.created):
            gone = [*describe_terminated(ctx.clients.ec2).get(ctx.name, ()), *found.instances]
            left = [m.left for m in gone if m.left and m.launch_time >= found.record.created]
            bucket = found.record.options.get("bucket")
            place = f"{bucket}{ctx.cloud.flag}" if bucket else ""
            return [_ended(max(left, default=None), place)]
        read = ask_head(ctx, found, lambda head: head.run(_READ).stdout, _HEAD_S)
    except (SprError, BotoCoreError, ClientError):
        return []
    lines = [] if isinstance(read, NoAnswer) else read.splitlines()
    said: list[Mapping[str, Any]] = []
    for line in lines:
        # The disk may have been full.
        with suppress(UsageError, KeyError):
            event = parse_object(line, "event")
            said.append(
                {
                    "time": event["time"],
                    "event": event["event"],
                    "what": f"by the nodes: {event['text']}",
                }
            )
    return said


def _ended(when: datetime | None, bucket: str) -> Mapping[str, Any]:
    """Return the event of the end; its time is "" once EC2 no longer says it."""
    what = "no machine is left: they powered off by themselves, or were ended elsewhere"
    what += f"; its jobs: spr-cluster jobs {bucket}" if bucket else ""
    return {"time": tags.render_time(when) if when else "", "event": "ended", "what": what}


def _bought_elsewhere(
    request: ClusterRequest, name: str, events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return events for the machines that the log does not mention, with the reason in their tags."""
    logged = {id_ for event in events for id_ in event.get("resources") or ()}
    ec2 = connect(open_chosen_cloud(request, name)).ec2
    found = describe_inventory(ec2, name, ("instances",))
    return [
        {
            "time": tags.render_time(instance.launch_time),
            "event": "bought",
            "what": f"1 x {instance.instance_type}, by another computer",
            "reason": instance.tags.get(tags.REPLACES, ""),
            "resources": [instance.id],
        }
        for instance in found.instances
        if instance.id not in logged
    ]


def _without_begun(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Omit the ``begun`` event of every action that has also ended."""
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
    if not text:
        return f"{'-':<{_INDENT - 2}}"
    try:
        time = tags.parse_time(text)
    except ValueError:
        return text
    return f"{time:%b %d %H:%M:%S}" if time.year == utc_now().year else f"{time:%Y-%m-%d %H:%M:%S}"
