"""What the jobs in a folder of results have cost, by month, owner, cluster, and tag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.places.record import read_job_id
from jobs.report.receipt import read_receipt
from jobs.report.results_folder import as_list

GROUPS = ("month", "owner", "cluster", "tags")
_NOTHING = {"jobs": 0, "node_hours": 0.0, "usd": None, "unpriced": 0}


@dataclass(frozen=True)
class JobCost:
    """An ended job: its hours on so many nodes, and what they have cost, if their price is known."""

    job: str
    month: str
    owner: str
    cluster: str
    tags: tuple[str, ...]
    """The cluster's own, as ``KEY=VALUE``."""
    nodes: int
    hours: float
    usd: float | None


def read_costs(root: Path) -> tuple[list[JobCost], list[str]]:
    """Return the jobs whose results are in folders below ``root``, the oldest first.

    Also returns the IDs of those whose record does not say how they ended. Of a job with several folders, the
    one that says the latest end counts.
    """
    found, unknown = dict[str, tuple[str, str, JobCost]](), dict[str, None]()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if known := read_receipt(folder, whole=False):
            run, receipt = known
            when, owner, cluster = (
                str(run.job.get(name) or "-") for name in ("when", "owner", "cluster")
            )
            pairs = [each for each in as_list(run.job.get("tags")) if isinstance(each, list)]
            tags = tuple("=".join(map(str, each)) for each in pairs)
            hours, usd = receipt.total_s / 3600, receipt.usd(receipt.total_s)
            job, ended = str(run.job.get("job") or run.name), str(run.job.get("ended") or "")
            cost = JobCost(job, when[:7], owner, cluster, tags, receipt.nodes, hours, usd)
            if job not in found or found[job][0] < ended:
                found[job] = ended, when, cost
        elif job := read_job_id(folder):
            unknown[job] = None
    costs = [cost for _, _, cost in sorted(found.values(), key=lambda each: each[1])]
    return costs, [job for job in unknown if job not in found]


def sum_by(costs: Iterable[JobCost], group: str) -> dict[str, dict[str, Any]]:
    """Return jobs, node hours, and dollars of each month, owner, cluster, or tag.

    The dollars are ``None`` if no job's price is known; ``unpriced`` counts jobs that they don't include.
    """
    sums: dict[str, dict[str, Any]] = {}
    for each in costs:
        names = getattr(each, group)
        for name in (names,) if isinstance(names, str) else names:
            one = sums.setdefault(name, {**_NOTHING})
            one["jobs"] += 1
            one["node_hours"] += each.nodes * each.hours
            if each.usd is None:
                one["unpriced"] += 1
            else:
                one["usd"] = (one["usd"] or 0.0) + each.usd
    return sums
