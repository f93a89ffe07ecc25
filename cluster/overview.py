"""Overview of an account's clusters, in one or all regions: state, prices, and cost so far."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from cluster.local_files import ClusterFiles, EventLog, home, utc_now
from cluster.nodes import is_unconnected
from infra.aws.clients import Clients, connect, translate_boto_error
from infra.aws.cloud import Cloud
from infra.cost.prices import Price, Prices, describe_prices
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord
from infra.ec2.instances import Instance
from infra.ec2.inventory import Inventory, describe_inventories, describe_terminated
from infra.ec2.key_pair import fingerprint, read_public
from infra.ec2.termination_schedule import with_guards
from infra.errors import SprError
from infra.iam.instance_profile import with_profiles
from infra.plan.planner import is_connected, rank_instances
from infra.spec import CLUSTER_NAME, ClusterOptions


def look_up_prices(cloud: Cloud, clients: Clients, types: Iterable[str], now: datetime) -> Prices:
    """Return the prices of instance types in the cloud's region; none for a cloud that bills nothing."""
    names = tuple(dict.fromkeys(types))
    if not cloud.billed or not names:
        return Prices(cloud.region)
    kept = home() / f"prices-{cloud.region}.json"
    return describe_prices(clients.pricing, cloud.region, names, kept, now.date())


_PARALLEL = 8
# Bare metal takes up to 20 minutes to boot, before the software is installed.
_LONGEST_START = timedelta(minutes=40)
_LONGEST_PAUSE = timedelta(minutes=10)


@dataclass(frozen=True)
class Overview:
    """One cluster as its tags describe it."""

    name: str
    region: str
    found: Inventory
    billed: bool
    prices: Prices = field(default_factory=Prices)
    terminated: Sequence[Instance] = ()
    """The machines with its name that EC2 still lists after their end."""

    @property
    def record(self) -> ClusterRecord | None:
        """Its recorded options; ``None`` if they are missing or damaged."""
        try:
            return self.found.record
        except SprError:
            return None

    @property
    def why_unreadable(self) -> str:
        """Why its recorded options are damaged, and what to do; "" if they are not."""
        try:
            _ = self.found.record
        except SprError as error:
            return str(error)
        return ""

    @property
    def wanted_nodes(self) -> int | None:
        return self.record.nodes if self.record else None

    @property
    def expires(self) -> datetime | None:
        """When its time to live is over: the latest time in the tags of its resources."""
        return self._last(tags.EXPIRES)

    @property
    def latest(self) -> datetime | None:
        """When its nodes shut down even if something is only on them."""
        ends = [end for end in (self.expires, self._last(tags.LATEST)) if end]
        return max(ends, default=None)

    def _last(self, label: str) -> datetime | None:
        group = self.found.group
        texts = [group.tags.get(label, "")] if group else []
        texts += [instance.tags.get(label, "") for instance in self.found.alive]
        try:
            return max((tags.parse_time(text) for text in texts if text), default=None)
        except ValueError:
            return None

    def cost(self, now: datetime) -> Price | None:
        """Return the cost of its machines since their launch, at on-demand prices, if known.

        Machines that were lost or replaced are known from the event log of the machine that bought them.
        If all have ended and EC2 no longer says when, that was at the latest end.
        """
        if not self.billed:
            return Price(0.0, "")
        record = self.record
        options = record.options if record else {}
        gib = options.get("volume_gib", ClusterOptions().volume_gib)
        speed = {"iops": options.get("volume_iops"), "mibps": options.get("volume_throughput")}
        cost = self.prices.accrued(self.found.alive, now, gib, **speed)
        if not (cost and record and self._bought):
            return cost
        ends = {machine.id: machine.left for machine in self._ended if machine.left}
        log = EventLog(ClusterFiles.of(self.name).events)
        unknown = log.unended(record.created) - ends.keys()
        if not self.found.alive:
            ends |= dict.fromkeys(unknown, min(now, record.latest))
        former_s = log.former_s(record.created, ends=ends)
        if not former_s:
            return cost
        public, name = not record.options["private"], next(iter(self.types), "")
        node = self.prices.node(name, gib, public=public, **speed)
        if node is None:
            return None
        usd = cost.usd + node.usd * former_s / 3600
        on_spot = any(event.get("market") == "spot" for event in self._bought)
        is_most = cost.is_most or on_spot or bool(unknown and not self.found.alive)
        return replace(node, usd=usd, source=cost.source or node.source, is_most=is_most)

    @property
    def types(self) -> list[str]:
        """The types of its machines, or of its former ones."""
        former = [event["type"] for event in self._bought if "type" in event]
        return [machine.instance_type for machine in self.found.alive] or former

    @property
    def _bought(self) -> list[dict[str, Any]]:
        """This machine's purchases for it."""
        if self.record is None or not self.is_owned_here:
            return []
        return EventLog(ClusterFiles.of(self.name).events).bought(self.record.created)

    @property
    def is_owned_here(self) -> bool:
        """Whether this machine has its key. Else the local files are of another cluster with its name."""
        group = self.found.group
        if group is None or not re.fullmatch(CLUSTER_NAME, self.name):
            return False
        own = fingerprint(read_public(ClusterFiles.of(self.name).key))
        return bool(own) and group.tags.get(tags.OWNER_KEY) == own

    @property
    def is_idle_here(self) -> bool:
        """Whether this machine has its key, so no other can change it, and is idle."""
        return self.is_owned_here and ClusterFiles.of(self.name).user() is None

    @property
    def _ended(self) -> list[Instance]:
        """Its machines that shut down or have ended, without those of an earlier cluster of its name."""
        gone = [*self.terminated, *(m for m in self.found.instances if m.state == "shutting-down")]
        return [m for m in gone if self.record and m.launch_time >= self.record.created]

    def state(self, now: datetime) -> str:
        """Return one of ``running``, ``starting``, ``degraded``, ``grace``, ``no machines``, ``expired``,
        ``kept image``, and ``none``.
        """
        if not self.found:
            return "none"
        alive = self.found.alive
        if not alive:
            unfinished = self.expires is not None and now < self.expires
            return "kept image" if self._is_kept() else "no machines" if unfinished else "expired"
        if self.latest and now >= self.latest:
            return "expired"
        if self.expires and now >= self.expires:
            return "grace"
        if any(instance.state == "pending" for instance in alive):
            return "starting"
        running = rank_instances(i for i in alive if i.state == "running")
        if len(running) == self.wanted_nodes and is_connected(running):
            return "running"
        return "starting" if self._may_be_starting(now) else "degraded"

    def _may_be_starting(self, now: datetime) -> bool:
        """Whether an `up`, here or on another machine, may still be creating it."""
        unconnected = is_unconnected(self.found.alive, self.wanted_nodes)
        is_new = self.record is not None and now - self.record.created < _LONGEST_START
        return is_new and unconnected and not self.is_idle_here

    def _age(self, now: datetime) -> timedelta | None:
        """Return the time since its creation or, without a readable record, since its first launch."""
        launched = min((machine.launch_time for machine in self.found.instances), default=None)
        began = self.record.created if self.record else launched
        return now - began if began else None

    def _is_kept(self) -> bool:
        rest = self.found.without_image()
        images = self.found.images
        return not rest and bool(images) and all(i.tags.get(tags.KEPT) == "yes" for i in images)

    def is_orphan(self, now: datetime) -> bool:
        """Whether `gc` removes it: it has expired, its expiry is unknown, or its machines have ended.

        A kept image is no orphan, nor is a cluster for which an `up` may still be buying machines.
        """
        return self.state(now) == "expired" or self.has_ended(now)

    def has_ended(self, now: datetime) -> bool:
        """Whether it has no machines, although it has not expired, and no `up` is buying any."""
        record = self.record
        if self.state(now) != "no machines" or record is None:
            return False
        is_old = now - record.created >= _LONGEST_START
        if self.is_owned_here:
            files = ClusterFiles.of(self.name)
            is_old = is_old or bool(self._bought)
            return self.is_idle_here and (is_old or files.removal.exists())
        # An `up` elsewhere waits for machines that shut down, and buys others in minutes, if at all.
        connected = any(tags.MESH in machine.tags for machine in self._ended)
        ends = [None if m.state == "shutting-down" else m.left for m in self._ended]
        return (is_old or connected) and all(e and now - e >= _LONGEST_PAUSE for e in ends)

    def as_dict(self, now: datetime) -> dict[str, Any]:
        """Return the cluster for ``--json``."""
        age, expires, latest, cost = self._age(now), self.expires, self.latest, self.cost(now)
        return {
            "cluster": self.name,
            "region": self.region,
            "state": self.state(now),
            "nodes": len(self.found.alive),
            "wanted_nodes": self.wanted_nodes,
            "age_s": None if age is None else round(age.total_seconds()),
            "left_s": round((expires - now).total_seconds()) if expires else None,
            "latest": tags.render_time(latest) if latest else None,
            "usd_so_far": round(cost.usd, 2) if cost else None,
            "price_source": (cost.source or None) if cost else None,
            "owner": self.found.owner or None,
            "resources": self.found.ids(),
        }


def list_clusters(
    cloud: Cloud, regions: Sequence[str]
) -> tuple[tuple[Overview, ...], dict[str, str]]:
    """Return our clusters in these regions, and errors by region that was not searched completely.

    Raises the first region's error if no region could be searched.
    """
    clients = {region: connect(replace(cloud, region=region)) for region in regions}
    for each in clients.values():
        # A boto3 session can create clients in only one thread at a time.
        _ = each.ec2, each.scheduler, each.iam, each.pricing

    errors: dict[str, ClientError | BotoCoreError] = {}

    def search(region: str) -> list[Overview] | None:
        found: dict[str, Inventory] | None = None
        ended: Mapping[str, Sequence[Instance]] = {}
        try:
            found = describe_inventories(clients[region].ec2)
            ended = describe_terminated(clients[region].ec2)
            found = with_guards(clients[region], found)
            found = with_profiles(clients[region], found)
        except (ClientError, BotoCoreError) as error:
            # An organization may close a region to its accounts.
            errors[region] = error
            # Without access to the scheduler, still list the machines, because they cost money.
            if found is None:
                return None
        clusters = [
            Overview(name, region, each, cloud.billed, terminated=ended.get(name, ()))
            for name, each in found.items()
        ]
        types = [type_ for each in clusters for type_ in each.types]
        prices = look_up_prices(replace(cloud, region=region), clients[region], types, utc_now())
        return [replace(each, prices=prices) for each in clusters]

    with ThreadPoolExecutor(min(_PARALLEL, len(regions))) as pool:
        answers = [answer for answer in pool.map(search, regions) if answer is not None]
    if not answers:
        raise errors[regions[0]]
    clusters = [each for found in answers for each in found]
    reasons = {r: translate_boto_error(errors[r]) for r in regions if r in errors}
    return tuple(clusters), {r: reason.message for r, reason in reasons.items() if reason}


def describe_regions(clients: Clients) -> tuple[str, ...]:
    """Return the regions that the account can use."""
    return tuple(sorted(each["RegionName"] for each in clients.ec2.describe_regions()["Regions"]))
