"""Machines that a cluster no longer has: EC2 forgets them after an hour, the event log does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from infra.ec2.tags import parse_time


def count_former_s(
    events: Iterable[Mapping[str, Any]], created: datetime, after: datetime | None = None
) -> float:
    """Return the seconds that a cluster's former machines ran, or those ``after`` a time. Pure.

    A machine counts from its purchase, once the cluster was ``created``, to the first plan without it:
    longer than it ran if EC2 ended it earlier. EC2 does not bill one that never booted.
    """
    began, ended = dict[str, datetime](), dict[str, datetime]()
    for event in events:
        kind, ids = event["event"], event["resources"]
        with suppress(ValueError):  # a damaged line
            time = parse_time(event["time"])
            if kind == "bought" and time >= created:
                began |= dict.fromkeys(ids, time)
            elif kind == "faulty" and event.get("ran") is False:
                began = {id_: began[id_] for id_ in began.keys() - ids}
            elif kind == "plan":  # it may keep a machine that EC2 did not list before
                ended = {id_: ended.get(id_, time) for id_ in began.keys() - ids}
    spans = (end - max(began[id_], after or created) for id_, end in ended.items() if id_ in began)
    return sum(max(0.0, span.total_seconds()) for span in spans)
