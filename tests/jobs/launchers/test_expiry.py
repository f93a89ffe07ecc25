"""A job on a cluster whose time to live ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from infra.errors import HostError, JobError
from jobs.launchers.queue.history import ExpiryWatch
from jobs.launchers.queue.session import attach
from tests.jobs.context import PATHS, event, job_context, make_hosts

NOW = datetime(2026, 11, 23, 14, tzinfo=timezone.utc)
EXTENDED = [None, NOW + timedelta(hours=2)]
FIGURES = dict.fromkeys(("epoch", "loss", "samples_per_second", "tokens_per_second"), 1.0)


@pytest.mark.parametrize("extended", EXTENDED)
def test_a_user_is_warned_once_that_a_job_is_late_and_once_that_the_end_is_near(
    extended: datetime | None,
) -> None:
    shown: list[str] = []
    times = [NOW]
    watch = ExpiryWatch(
        NOW + timedelta(hours=1), "--name x", shown.append, lambda: extended, lambda: times[0]
    )
    watch.see_eta(3000)
    watch.tick()
    assert shown == []
    for _ in range(2):
        watch.see_eta(5400)
    times = [NOW + timedelta(minutes=51)]
    for _ in range(2):
        watch.tick()
    ends = [text.splitlines()[-1].partition(": ")[2] for text in shown]
    commands = [f"spr-cluster extend {hours}h --name x" for hours in (1, 2)]
    assert ends == ([] if extended else commands)
    if not extended:
        assert "shut down at 15:00 UTC (in 1 h); training would end at about 15:30 UTC" in shown[0]
        assert "shut down at 15:00 UTC (in 9 min); the job and its" in shown[1]


@pytest.mark.parametrize("extended", EXTENDED)
def test_a_job_that_ended_with_its_cluster_says_so(
    extended: datetime | None, tmp_path: Path
) -> None:
    said = event(event="step", step=1, total=2, eta_seconds=60.0, shares={}, **FIGURES)
    hosts, log = make_hosts([said]), list[str]()
    lost = HostError("node0", "no SSH")
    hosts["node0"].answers[:0] = [("cat .*/end.json", lost)]
    past, later = (datetime.now(timezone.utc) + timedelta(minutes=n) for n in (-1, 120))
    context = job_context(hosts, log=log, find_expiry=lambda: later if extended else past)
    context = replace(context, cluster=replace(context.cluster, expires=past))
    message = r"\[node0\] no SSH" if extended else "whose time to live was over at .*: .* no SSH"
    with pytest.raises(HostError if extended else JobError, match=message) as caught:
        attach(context, PATHS.job_id, tmp_path)
    assert ("spr-cluster up --name bert" in str(caught.value)) is not bool(extended)
    assert any("warning: the nodes shut down" in line for line in log) is not bool(extended)
