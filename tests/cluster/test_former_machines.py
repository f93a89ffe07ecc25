"""How long a cluster's former machines ran, from its event log."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from cluster.former_machines import count_former_s
from infra.ec2.tags import render_time

CREATED = datetime(2026, 7, 31, 14, tzinfo=timezone.utc)


def event(minute: float, kind: str, *ids: str, **more: Any) -> dict[str, Any]:
    time = render_time(CREATED + timedelta(minutes=minute))
    return {"time": time, "event": kind, "resources": [*ids], **more}


@pytest.mark.parametrize(
    ("events", "after", "minutes"),
    [
        ([event(-9, "bought", "i-0"), event(0, "plan")], None, 0),
        ([event(1, "bought", "i-0", "i-1"), event(9, "plan", "i-0", "i-1")], None, 0),
        ([event(1, "bought", "i-0", "i-1"), event(9, "plan", "i-0")], None, 8),
        ([event(1, "bought", "i-0"), event(9, "plan"), event(20, "plan")], None, 8),
        ([event(1, "bought", "i-0"), event(9, "plan")], 5, 4),
        ([event(1, "bought", "i-0"), event(9, "plan")], 10, 0),
        ([event(1, "bought", "i-0"), event(2, "plan"), event(3, "plan", "i-0")], None, 0),
        ([event(1, "bought", "i-0"), event(41, "faulty", "i-0", ran=False), event(41, "plan")], None, 0),
        ([event(1, "bought", "i-0"), event(41, "faulty", "i-0", ran=True), event(41, "plan")], None, 40),
        ([event(1, "bought", "i-0"), {**event(9, "plan"), "time": "damaged"}], None, 0),
    ],
)  # fmt: skip
def test_a_former_machine_is_paid_from_its_purchase_to_the_plan_without_it(
    events: list[dict[str, Any]], after: float | None, minutes: float
) -> None:
    since = None if after is None else CREATED + timedelta(minutes=after)
    assert count_former_s(events, CREATED, since) == 60 * minutes
