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
from infra.ec2.inventory import describe_inventory
from infra.errors import UsageError
from infra.instance_types import TABLE_REGION
from infra.spec import LONGEST_TTL
from infra.words import counted, spoken_duration, spoken_time
from jobs.cli.shared.job_options import QueueRequest
from jobs.worker.spec import JobSpec
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
    max_time: timedelta | None = None
    budget: float | None = None

    @property
    def _grace(self) -> timedelta:
        grace: timedelta = self.record.options["grace"]
        return grace

    @property
    def paid_node_s(self) -> float:
        """How many seconds of one node the budget pays; 0 without one."""
        return 3600 * self.budget / self.price.usd if self.budget and self.price else 0.0

    def paid(self, used: int | None) -> timedelta:
        """Return how long the budget pays for a job on ``used`` nodes, with the time for its checkpoint.

        After the cluster's own time to live, the job pays for all nodes.
        """
        if not self.paid_node_s:
            return LONGEST_TTL
        own_s = max(0.0, (self.record.expires - self.now).total_seconds())
        seconds = paid_s(self.paid_node_s, own_s, used or self.nodes, self.nodes)
        return min(seconds, LONGEST_TTL.total_seconds()) * timedelta(seconds=1)

    def time(self, used: int | None) -> timedelta:
        """Return how long the job may take from its first start."""
        return min(self.max_time or LONGEST_TTL, self.paid(used) - _SAVE)

    def latest(self, used: int | None) -> datetime:
        """Return until when it may keep the nodes, with the grace period: at most the cluster's bound."""
        record, grace = self.record, self._grace
        bound = record.bound or record.created + LONGEST_TTL
        wanted = self.now + min(self.time(used) + _SAVE + grace, self.paid(used))
        return max(record.latest, min(wanted, bound)).replace(microsecond=0)

    def ends(self, used: int | None) -> datetime:
        """Return when the job is stopped, if it still runs, because its nodes end."""
        return max(self.record.expires, self.latest(used) - self._grace)

    def check(self, used: int | None, least_s: float = 0.0) -> None:
        """Raise :class:`UsageError` if the budget pays for no work; reading the data takes ``least_s``."""
        least = max(_MINUTE, timedelta(seconds=least_s)) + _SAVE
        if self.budget and self.price and self.paid(used) < least:
            count, reads = used or self.nodes, least > _MINUTE + _SAVE
            usd = self.price.usd * count * (least / _HOUR)
            what = (
                "what it took to read the data" if reads else "a minute, which EC2 bills at least"
            )
            raise UsageError(
                f"--budget {self.budget:g}: the shortest job on {counted(count, 'node')} costs ${usd:.2f}: "
                f"{what}, and two minutes to save a checkpoint"
            )

    def describe(self, used: int | None, *, billed: bool) -> str:
        """Return what the job may cost, and how long it may keep the nodes, in one line."""
        record, latest, time = self.record, self.latest(used), self.time(used)
        flag = "--budget" if self.budget and time < (self.max_time or LONGEST_TTL) else "--max-time"
        text = f"this job may take {spoken_duration(time.total_seconds())} ({flag})"
        if latest > record.latest:
            text += f" and keep the nodes until {spoken_time(latest, self.now)}"
            if self.price:
                usd = self.price.usd * self.nodes * ((latest - record.latest) / _HOUR)
                text += f", for at most ${usd:.2f} more" + ("" if billed else " on AWS")
        if self.ends(used) < self.now + time:
            end = spoken_time(self.ends(used), self.now)
            why = (
                "`up --max-time` or `--budget` allows no more"
                if record.bound
                else f"no cluster lives longer than {LONGEST_TTL.days} days"
            )
            text += f"; the nodes shut down before that, at {end}: {why}"
        return text


def find_limit(
    ctx: Context, request: QueueRequest, cluster: Cluster, prices: Prices
) -> JobLimit | None:
    """Return the job's limit, if it has one. Raises :class:`UsageError` if it can't be kept."""
    if not (request.max_time or request.budget):
        return None
    record = describe_inventory(ctx.clients.ec2, ctx.name, ("security_groups",)).record
    if record is None or record.is_over(ctx.now()):
        raise (
            time_is_over(ctx, record)
            if record
            else UsageError(
                f"cluster {ctx.name!r} has no record", hint=f"spr-cluster up {ctx.flags}"
            )
        )
    machines = [node.instance for node in cluster.nodes]
    types = [machine.instance_type for machine in machines]
    on_demand = not all(machine.spot_request for machine in machines)
    known = prices if ctx.cloud.billed else table_prices(TABLE_REGION, types)
    price = known.most(types, record.options, on_demand=on_demand)
    price = price if price and price.is_here else None
    if request.budget and price is None:
        raise UsageError(
            "--budget: the price of these nodes is unknown, so it can't be kept",
            hint="use --max-time",
        )
    return JobLimit(record, ctx.now(), len(machines), price, request.max_time, request.budget)


def keep_limit(
    ctx: Context,
    limit: JobLimit | None,
    spec: JobSpec,
    least_s: float,
    log: Callable[[str], None],
) -> JobSpec:
    """Move the end of the nodes as far as the job may; return the job with its limit in time."""
    if limit is None:
        return spec
    limit = replace(limit, now=ctx.now())
    used = spec.resources.nodes
    limit.check(used, least_s)
    raise_latest(ctx, ctx.name, limit.latest(used))
    log(limit.describe(used, billed=ctx.cloud.billed))
    seconds = limit.time(used).total_seconds()
    ending = replace(spec.ending, max_time_s=seconds, paid_node_s=limit.paid_node_s)
    return replace(spec, ending=ending)
