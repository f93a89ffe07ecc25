"""Prices as commands look them up, and what a cluster has cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from cluster.local_files import home
from infra.aws.clients import Clients
from infra.aws.cloud import Cloud
from infra.cost.prices import Price, Prices, describe_prices


def look_up_prices(cloud: Cloud, clients: Clients, types: Iterable[str], now: datetime) -> Prices:
    """Return the prices of these types in the cloud's region; none where nothing is billed."""
    names = tuple(dict.fromkeys(types))
    if not cloud.billed or not names:
        return Prices(cloud.region)
    kept = home() / f"prices-{cloud.region}.json"
    return describe_prices(clients.pricing, cloud.region, names, kept, now.date())


def cost_as_dict(cost: Price | None) -> dict[str, Any]:
    """Return what machines have cost for ``--json``: an estimate if its source is another region."""
    if cost is None:
        return {"usd_so_far": None, "price_source": None}
    return {"usd_so_far": round(cost.usd, 2), "price_source": cost.source or None}


def show_cost(row: Mapping[str, Any]) -> str:
    """Return a cost from :func:`cost_as_dict` for people."""
    return "?" if row["usd_so_far"] is None else f"${row['usd_so_far']:.2f}"
