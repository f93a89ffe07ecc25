"""Snapshot: the state that the live view shows and ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Annotated

from pydantic import Field

from infra.cost.spending import Spending
from infra.files import parse_as
from jobs.top.queue_and_logs import CONNECTING

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Figure = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
SLOWER = 1.2
"""A straggler computes this many times longer per step than the median of its job's ranks."""


@dataclass(frozen=True)
class CoreGroup:
    """CPUs with the same use, by ranks of one ``job``.

    ``busy`` is in percent of their time; ``cpus`` lists those of ranks.
    """

    name: str
    ranks: tuple[Count, ...]
    cpus: str
    count: Count
    busy: Figure
    job: str = ""


@dataclass(frozen=True)
class LiveRank:
    """A rank's newest step, and averages over its last seconds; ``None`` if unknown.

    ``communication`` is the fraction of time spent waiting for other ranks, ``own_seconds`` the rest of
    each step. ``age_s`` is the time since its metrics file was written.
    """

    job: str
    rank: Count
    step: Count | None = None
    loss: Figure | None = None
    samples_per_second: Figure | None = None
    communication: Figure | None = None
    own_seconds: Figure | None = None
    age_s: Figure = 0.0
    straggler: bool = False


@dataclass(frozen=True)
class LiveNode:
    """A node's metrics, or the ``error`` why there are none.

    ``busy`` is in percent of all CPUs, ``received`` and ``sent`` are in bytes per second, ``memory`` and
    ``available`` in bytes.
    """

    name: str
    error: str = ""
    busy: Figure = 0.0
    groups: tuple[CoreGroup, ...] = ()
    memory: Count = 0
    available: Count = 0
    received: Count = 0
    sent: Count = 0
    ranks: tuple[LiveRank, ...] = ()

    @property
    def stragglers(self) -> tuple[LiveRank, ...]:
        return tuple(rank for rank in self.ranks if rank.straggler)

    @property
    def rank_busy(self) -> float:
        """How busy the CPUs of its ranks are; without ranks, all of them."""
        mine = [group for group in self.groups if group.ranks]
        count = sum(group.count for group in mine)
        return sum(g.busy * g.count for g in mine) / count if count else self.busy

    @property
    def rest_busy(self) -> float | None:
        """How busy the CPUs without ranks are; ``None`` if there are none."""
        return next((group.busy for group in self.groups if group.name == "rest"), None)

    def group_of(self, rank: LiveRank) -> CoreGroup | None:
        mine = (group for group in self.groups if group.job == rank.job)
        return next((group for group in mine if rank.rank in group.ranks), None)


@dataclass(frozen=True)
class LiveJob:
    """A running job, by its log. ``age_s`` is the time since the log was written.

    ``score`` is that of the last evaluation, by the ``metric`` that chooses the best model.
    """

    job: str
    phase: str = ""
    step: Count | None = None
    total: Count | None = None
    loss: Figure | None = None
    samples_per_second: Figure | None = None
    eta_seconds: Figure | None = None
    age_s: Figure = 0.0
    metric: str = ""
    score: Figure | None = None
    best_score: Figure | None = None
    best_step: Count | None = None
    usd_per_hour: Figure | None = None
    began: Figure | None = None
    """When it last started, in seconds since 1970."""
    budget: Figure = 0.0
    max_time_s: Figure = 0.0
    spent_s: Figure = 0.0
    spent_usd: Figure = 0.0

    def spending(self, now: float) -> Spending:
        """Return what it costs, at the price on demand."""
        took = max(0.0, now - self.began) if self.began else 0.0
        limits = self.budget, self.max_time_s, self.spent_s, self.spent_usd
        return Spending(took, self.left_s, self.usd_per_hour, *limits)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step."""
        return None if self.eta_seconds is None else max(0.0, self.eta_seconds - self.age_s)


@dataclass(frozen=True)
class QueueRow:
    """A line of Slurm's queue. ``cores`` are those of all nodes, once the job has them."""

    id: str
    name: str
    state: str
    passed: str
    nodes: Count
    where: str
    reason: str
    cores: Count = 0


@dataclass(frozen=True)
class Snapshot:
    """A cluster at a ``time``, in seconds since 1970. ``usd`` is its cost so far, if that is known.
    With ``usd_is_most``, less may be billed.
    """

    time: Figure
    nodes: tuple[LiveNode, ...]
    jobs: tuple[LiveJob, ...] = ()
    queue: tuple[QueueRow, ...] = ()
    queued: Count = 0
    """Jobs in the queue; not all may be listed."""
    queue_error: str = ""
    cluster: str = ""
    usd: Figure | None = None
    usd_is_most: bool = False
    ttl_left_s: Figure | None = None
    grace_left_s: Figure | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every node and the queue have answered or failed."""
        return CONNECTING not in (self.queue_error, *(node.error for node in self.nodes))

    @property
    def ranks(self) -> tuple[LiveRank, ...]:
        return tuple(rank for node in self.nodes for rank in node.ranks)


def parse_snapshot(line: str, name: str) -> Snapshot:
    """Parse a line of the relay; ``name`` says where it is. Raises :class:`UsageError`."""
    return mark_stragglers(parse_as(Snapshot, line, name))


def mark_stragglers(snapshot: Snapshot) -> Snapshot:
    """Mark the ranks that compute longer per step than :data:`SLOWER` times their job's median."""
    own: dict[str, list[float]] = {}
    for rank in snapshot.ranks:
        if rank.own_seconds is not None:
            own.setdefault(rank.job, []).append(rank.own_seconds)
    limits = {job: SLOWER * median(seconds) for job, seconds in own.items()}

    def mark(rank: LiveRank) -> LiveRank:
        slow = rank.own_seconds is not None and rank.own_seconds > limits[rank.job]
        return replace(rank, straggler=slow)

    nodes = (replace(node, ranks=tuple(map(mark, node.ranks))) for node in snapshot.nodes)
    return replace(snapshot, nodes=tuple(nodes))


def combine(ranks: Sequence[LiveRank]) -> LiveRank:
    """Combine a node's ranks: the earliest step, the sum of samples, the mean share, the longest time."""

    def known(name: str) -> list[float]:
        values = (getattr(rank, name) for rank in ranks)
        return [value for value in values if value is not None]

    steps, shares, own = known("step"), known("communication"), known("own_seconds")
    samples = known("samples_per_second")
    return LiveRank(
        job="",
        rank=0,
        step=int(min(steps)) if steps else None,
        samples_per_second=sum(samples) if samples else None,
        communication=mean(shares) if shares else None,
        own_seconds=max(own) if own else None,
    )
