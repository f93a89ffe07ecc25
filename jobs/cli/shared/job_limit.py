"""``--max-time`` and ``--budget`` of a job: its time limit, and the end of the nodes that it may move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cluster.context import Context
from cluster.lifecycle.deadline import raise_latest
from cluster.lifecycle.prepare import time_is_over
from cluster.nodes import Cluster
from infra.cost.prices import Price, Prices, table_prices
from infra.ec2.cluster_record import ClusterRecord
from infra.ec2.inventory import find_group
from infra.errors import UsageError
from infra.instance_types import TABLE_REGION
from infra.spec import LONGEST_TTL
from infra.words import counted, spoken_duration, spoken_time
from jobs.places.plan import JobPlan
from jobs.worker.supervisor.deadline import SAVE_S, paid_s

_SAVE = timedelta(seconds=SAVE_S)
_HOUR = timedelta(hours=1)
# EC2 bills at least a minute: https://aws.amazon.com/ec2/pricing/on-demand/
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True)
class JobLimit:
    """A job's limits, on a cluster of ``nodes`` nodes that each cost at most ``price`` per hour."""

    record: ClusterRecord
    now: datetime
    nodes: int
    price: Price | None = None
    share: float = 1.0
    """What the job pays of each node's price until the cluster's own time to live ends."""
    max_time: timedelta | None = None
    budget: float | None = None
    spent: timedelta = timedelta()
    spent_usd: float = 0.0
    """What the runs that it resumes took of its limits."""

    @property
    def _grace(self) -> timedelta:
        grace: timedelta = self.record.options["grace"]
        return grace

    @property
    def paid_node_s(self) -> float:
        """How many seconds of one node the budget still pays; 0 without one."""
        if not (self.budget and self.price):
            return 0.0
        return 3600 * max(0.0, self.budget - self.spent_usd) / self.price.usd

    def paid(self, used: int | None) -> timedelta:
        """Return how long the budget pays for a job on ``used`` nodes, with the time for its checkpoint.

        After the cluster's own time to live, the job pays for all nodes.
        """
        if not (self.budget and self.price):
            return LONGEST_TTL
        own_s = max(0.0, (self.record.expires - self.now).total_seconds())
        part = (used or self.nodes) * self.share
        seconds = paid_s(self.paid_node_s, own_s, part, self.nodes)
        return min(seconds, LONGEST_TTL.total_seconds()) * timedelta(seconds=1)

    @property
    def _own_time(self) -> timedelta:
        return self.max_time - self.spent if self.max_time else LONGEST_TTL

    def time(self, used: int | None) -> timedelta:
        """Return how long the job may still take from its start."""
        return min(self._own_time, self.paid(used) - _SAVE)

    def flag(self, used: int | None) -> str:
        """Return the option that limits it."""
        return "--budget" if self.budget and self.time(used) < self._own_time else "--max-time"

    @property
    def _bound(self) -> datetime:
        return self.record.bound or self.record.created + LONGEST_TTL

    def latest(self, used: int | None) -> datetime:
        """Return until when it may keep the nodes, with the grace period: at most the cluster's bound."""
        wanted = self.now + min(self.time(used) + _SAVE + self._grace, self.paid(used))
        return max(self.record.latest, min(wanted, self._bound)).replace(microsecond=0)

    def ends(self, used: int | None) -> datetime:
        """Return when its nodes end, if it takes as long as it may.

        An earlier job may have moved their latest end further than that.
        """
        longest = (self.now + self.time(used) + _SAVE).replace(microsecond=0)
        return max(self.record.expires, min(longest, self.latest(used) - self._grace))

    def check(self, used: int | None, least_s: float = 0.0) -> None:
        """Raise :class:`UsageError` if a limit pays for no work; reading the data takes ``least_s``."""
        if self.spent and self.time(used) < _MINUTE:
            flag, took = self.flag(used), spoken_duration(self.spent.total_seconds())
            took += f", for ${self.spent_usd:.2f}" if self.spent_usd else ""
            raise UsageError(
                f"{flag}: less than a minute is left: the job took {took}",
                hint=f"give a higher {flag}, which counts that as well",
            )
        least = max(_MINUTE, timedelta(seconds=least_s)) + _SAVE
        if self.budget and self.price and self.paid(used) < least:
            count, reads = used or self.nodes, least > _MINUTE + _SAVE
            usd = self.price.usd * self.share * count * (least / _HOUR)
            what = (
                "what it took to read the data" if reads else "a minute, which EC2 bills at least"
            )
            raise UsageError(
                f"--budget {self.budget:g}: the shortest job on {counted(count, 'node')} costs ${usd:.2f}: "
                f"{what}, and at least two minutes to save a checkpoint"
            )

    def describe(self, used: int | None, *, billed: bool) -> str:
        """Return what the job may cost, and how long it may keep the nodes, in one line."""
        record, latest, time = self.record, self.latest(used), self.time(used)
        more = " more" if self.spent else ""
        text = (
            f"this job may take {spoken_duration(time.total_seconds())}{more} ({self.flag(used)})"
        )
        if latest > record.latest:
            text += f" and keep the nodes until {spoken_time(latest, self.now)}"
            if self.price:
                usd = self.price.usd * self.nodes * ((latest - record.latest) / _HOUR)
                text += f", for at most ${usd:.2f} more" + ("" if billed else " on AWS")
        if self.ends(used) < (self.now + time).replace(microsecond=0):
            end = spoken_time(self.ends(used), self.now)
            why = "--budget also pays for the grace period"
            if latest >= self._bound:
                why = (
                    "`up --max-time` or `--budget` allows no more"
                    if record.bound
                    else f"no cluster lives longer than {LONGEST_TTL.days} days"
                )
            text += f"; the nodes shut down before that, at {end}: {why}"
        return text


def find_limit(
    ctx: Context,
    cluster: Cluster,
    prices: Prices,
    max_time: timedelta | None,
    budget: float | None,
) -> JobLimit | None:
    """Return a job's limit, if it has one. Raises :class:`UsageError` if it can't be kept."""
    if not (max_time or budget):
        return None
    record = find_group(ctx.clients.ec2, ctx.name).record
    machines = [node.instance for node in cluster.nodes]
    if record is None or record.is_over(ctx.now()):
        raise (
            time_is_over(ctx, record, machines)
            if record
            else UsageError(
                f"cluster {ctx.name!r} has no record", hint=f"spr-cluster up {ctx.flags}"
            )
        )
    types = [machine.instance_type for machine in machines]
    known = prices if ctx.cloud.billed else table_prices(TABLE_REGION, types)
    price = known.most(types, record.dearest)
    price = price if price and price.is_here else None
    if budget and price is None:
        raise UsageError(
            "--budget: the price of these nodes is unknown, so it can't be kept",
            hint="use --max-time",
        )
    return JobLimit(record, ctx.now(), len(machines), price, max_time=max_time, budget=budget)


def keep_limit(
    ctx: Context,
    cluster: Cluster,
    prices: Prices,
    plan: JobPlan,
    least_s: float,
    log: Callable[[str], None],
) -> JobPlan:
    """Move the end of the nodes as far as the job may; return its plan with the limit in time."""
    ending, used = plan.spec.ending, plan.spec.resources.nodes
    max_time = timedelta(seconds=ending.max_time_s)
    limit = find_limit(ctx, cluster, prices, max_time, ending.budget)
    if limit is None:
        return plan
    limit = replace(limit, share=ending.node_share)
    if spent := plan.details.get("spent"):
        took = timedelta(seconds=round(spent["seconds"]))
        limit = replace(limit, spent=took, spent_usd=spent["usd"])
    limit.check(used, least_s)
    raise_latest(ctx, limit.latest(used))
    log(limit.describe(used, billed=ctx.cloud.billed))
    seconds = limit.time(used).total_seconds()
    asked = {"max_time_s": ending.max_time_s, "budget": ending.budget}
    usd = limit.price.usd if limit.price else 0.0
    alone = {"from": limit.record.expires.timestamp(), "nodes": limit.nodes}
    kept = {**asked, "usd_per_hour": usd, "alone": alone}
    ending = replace(ending, max_time_s=seconds, paid_node_s=limit.paid_node_s)
    ending = replace(ending, by_budget=limit.flag(used) == "--budget")
    details = {**plan.details, "limit": kept}
    return replace(plan, spec=replace(plan.spec, ending=ending), details=details)
