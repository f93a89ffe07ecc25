"""How long a job may take and keep its nodes, by --max-time and --budget."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from infra.cost.prices import ADDRESS_USD, Price, table_prices
from infra.ec2.cluster_record import ClusterRecord
from infra.errors import UsageError
from infra.spec import ClusterOptions
from jobs.cli.shared.job_limit import JobLimit

NOW = datetime(2026, 7, 31, 12, tzinfo=timezone.utc)
HOUR, GRACE = timedelta(hours=1), timedelta(minutes=30)
SAVE = timedelta(minutes=2)
METAL = "r7iz.metal-16xl"


def limit(bound: float | None = None, *, ttl: float = 2.0, **given: Any) -> JobLimit:
    """A job's limit on four nodes for a dollar an hour each; ``bound`` is in hours from now."""
    record = ClusterRecord(
        {"grace": GRACE},
        NOW,
        NOW + ttl * HOUR,
        NOW + ttl * HOUR + GRACE,
        bound=None if bound is None else NOW + bound * HOUR,
    )
    return JobLimit(record, NOW, 4, Price(1.0, "a list"), **given)


def test_a_short_job_moves_nothing() -> None:
    for short in (limit(max_time=HOUR), limit(budget=4.0)):
        assert short.latest(None) == short.record.latest
        assert short.ends(None) == short.record.expires
        assert "keep the nodes" not in short.describe(None, billed=True)
    assert limit(max_time=HOUR).time(None) == HOUR
    assert limit(budget=4.0).time(None) == HOUR - SAVE


def test_a_long_job_keeps_the_nodes_until_its_limit_and_the_grace_period() -> None:
    long = limit(max_time=8 * HOUR)

    assert long.latest(None) == NOW + 8 * HOUR + SAVE + GRACE
    assert long.ends(None) == NOW + 8 * HOUR + SAVE
    text = long.describe(None, billed=False)
    assert text.startswith("this job may take 8 h (--max-time) and keep the nodes until")
    assert "for at most $24.13 more on AWS" in text


@pytest.mark.parametrize(("bound", "hours"), [(6.0, 6.0), (2.5, 2.5), (None, 720.0)])
def test_no_job_moves_the_end_beyond_the_clusters_limit(bound: float | None, hours: float) -> None:
    long = limit(bound, max_time=720 * HOUR)

    assert long.latest(None) == NOW + hours * HOUR
    assert "the nodes shut down before that" in long.describe(None, billed=True)


def test_a_budget_pays_for_the_jobs_nodes_and_after_the_time_to_live_for_all() -> None:
    assert limit(budget=2.0).paid(1) == 2 * HOUR
    assert limit(budget=1.0).paid(2) == HOUR / 2
    assert limit(budget=10.0).paid(1) == 4 * HOUR
    assert limit(budget=2.0, share=0.25).paid(1) == 2.375 * HOUR
    assert limit(budget=16.0).paid(None) == limit(budget=16.0).paid(4) == 4 * HOUR


def test_nodes_that_stay_for_a_job_end_with_its_budget() -> None:
    """The grace period is within it."""
    paid = limit(budget=16.0)

    assert paid.latest(None) == NOW + 4 * HOUR
    assert paid.ends(None) == NOW + 3.5 * HOUR
    assert "at 15:30 UTC" in (text := paid.describe(None, billed=True))
    assert text.endswith(": --budget also pays for the grace period")
    both = limit(budget=16.0, max_time=3 * HOUR)
    assert both.time(None) == 3 * HOUR
    assert both.latest(None) == NOW + 3 * HOUR + SAVE + GRACE
    assert limit(budget=16.0, max_time=4 * HOUR).time(None) == 4 * HOUR - SAVE
    assert "(--budget)" in limit(budget=4.0, max_time=HOUR).describe(None, billed=True)


def test_a_budget_pays_for_the_least_that_is_billed() -> None:
    limit(budget=4.0 * 3.1 / 60).check(None)
    limit(budget=4.0 * 2.9 / 60).check(1)
    with pytest.raises(
        UsageError, match=r"^--budget 0.19: the shortest job on 4 nodes costs \$0.20: a"
    ):
        limit(budget=0.19).check(None)
    limit(budget=0.19, share=0.5).check(None)
    limit(budget=4.0).check(None, 58 * 60 - 1)
    with pytest.raises(UsageError, match=r"costs \$4.07: what it took to read the data, and at"):
        limit(budget=4.0).check(None, 59 * 60)


def test_an_earlier_jobs_end_of_the_nodes_is_not_that_of_a_shorter_one() -> None:
    old = limit(max_time=HOUR)
    stale = replace(old, record=replace(old.record, latest=NOW + 9 * HOUR))
    assert stale.latest(None) == NOW + 9 * HOUR
    assert stale.ends(None) == stale.record.expires
    assert replace(stale, max_time=3 * HOUR).ends(None) == NOW + 3 * HOUR + SAVE
    assert stale.record.job_ends == NOW + 9 * HOUR - GRACE


def test_what_a_resumed_job_took_counts() -> None:
    took: dict[str, Any] = {"spent": HOUR / 2, "spent_usd": 2.0}
    again = limit(max_time=3 * HOUR, **took)
    assert again.time(None) == 2.5 * HOUR
    assert again.describe(None, billed=True).startswith("this job may take 2 h 30 min more (--max")
    paid = limit(budget=4.0, **took)
    assert (paid.time(None), paid.paid_node_s) == (HOUR / 2 - SAVE, 7200.0)
    again.check(None)
    paid.check(None)
    said = "less than a minute is left: the job took 30 min, for $2.00"
    limits = {"--max-time": limit(max_time=HOUR / 2, **took), "--budget": limit(budget=2.1, **took)}
    for flag, refused in (*limits.items(), ("--budget", limit(budget=1.0, **took))):
        with pytest.raises(UsageError) as caught:
            refused.check(None)
        assert caught.value.message == f"{flag}: {said}"
        assert caught.value.hint == f"give a higher {flag}, which counts that as well"


def options(**changes: Any) -> dict[str, Any]:
    return {**ClusterOptions().model_dump(), **changes}


def test_the_highest_price_of_a_node_has_its_disk_and_address_and_spots_maximum() -> None:
    prices = table_prices("us-east-1", [METAL, "m7i.metal-24xl"])

    def most(*types: str, **changes: Any) -> float:
        found = prices.most(types or (METAL,), options(**changes))
        assert found
        return found.usd

    disk = 100 * 0.08 / 720
    assert most() == pytest.approx(6.5472 + disk + ADDRESS_USD)
    assert most(private=True, volume_gib=200) == pytest.approx(6.5472 + 2 * disk)
    assert most("m7i.metal-24xl", METAL) == most()
    spot: dict[str, Any] = {"market": "spot", "max_price": 2.0}
    assert most(**spot) == pytest.approx(2 + disk + ADDRESS_USD)
    assert most(market="spot") == most(max_price=2.0) == most()
    assert most(market="spot", max_price=9.0) == pytest.approx(9 + disk + ADDRESS_USD)
    mixed: dict[str, Any] = {"market": "spot-or-on-demand"}
    assert most(max_price=2.0, **mixed) == most()
    assert most(max_price=9.0, **mixed) > 9
    assert prices.most(("x1.large",), options()) is None
