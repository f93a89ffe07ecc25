"""The proposal that ``up`` shows before buying: actions, price, quota, zones, and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from cluster.context import Context
from cluster.lifecycle.prepare import find_offers
from cluster.overview import look_up_prices
from infra.cost.compared_types import find_cheaper
from infra.cost.prices import ADDRESS_USD, Price, Prices, table_prices, with_spot
from infra.cost.quotas import (
    count_in_market,
    describe_quota,
    quota_code,
    require_quota,
)
from infra.ec2.cluster_record import SHUTDOWN, ClusterRecord, limit_record, parse_record
from infra.ec2.images import find_ubuntu_image
from infra.ec2.purchase import SPOT, Offer, cheapest_zone_first
from infra.ec2.tags import render_time
from infra.ec2.termination_schedule import COST
from infra.errors import UsageError
from infra.iam.bucket_access import check_buckets
from infra.instance_types import INSTANCE_TYPES, TABLE_REGION, InstanceType, is_standard
from infra.plan.actions import Action, ActionKind, Plan
from infra.plan.planner import PlanInput, expected_by_bake, plan_up
from infra.spec import OPTIONS
from infra.words import counted, render_duration, spoken_day, spoken_time
from provision.stacks.compatibility import describe_software, summarize_state
from provision.stacks.load import load_stack

# A shorter-lived cluster would cost money and end before it could be used.
_SHORTEST = timedelta(minutes=30)
# For the answer to the question whether to buy, and a node's least use.
_SPARE = timedelta(minutes=10)
_GUARDED = f"Second guard: AWS terminates machines that do not shut down ({COST})."
_UNGUARDED = (
    "A machine that never boots does not shut down: --second-guard lets AWS terminate it as well "
    f"({COST})."
)
_SMALL_GIB = 8
# Another type is worth a line if its work costs at most this share.
_MUCH_CHEAPER = 2 / 3


@dataclass(frozen=True)
class Proposal:
    """A plan with everything that the user needs to know before confirming."""

    ctx: Context
    plan_input: PlanInput
    plan: Plan
    offers: Sequence[Offer]
    quota_held: int | None
    quota_problem: str = ""
    """Why the quota is unknown."""
    notes: Sequence[str] = ()
    """Possible obstacles to the purchase, and unsupported software."""

    def from_now(self) -> Proposal:
        """Return it with a time to live that begins now, if it creates the machines of a new cluster.

        The user may have thought about it for an hour.
        """
        given, record = self.plan_input, self.plan_input.record
        old = parse_record(given.group.tags) if given.group else None
        if given.found.alive or (old and old.created == record.created):
            return self
        given = replace(given, record=record.begun(self.ctx.now()))
        return replace(self, plan_input=given, plan=plan_up(given))

    @property
    def _machines(self) -> dict[str, InstanceType]:
        """The types by name; types that are in neither the table nor an offer are left out."""
        kept, spec = self.plan.keep, self.plan_input.spec
        names = [kept[0].instance_type] if kept else spec.instance_types
        known = INSTANCE_TYPES | {offer.type.name: offer.type for offer in self.offers}
        return {name: known[name] for name in names if name in known}

    @property
    def _vcpus_by_type(self) -> dict[str, int]:
        nodes = count_in_market(self.plan_input.spec, self.plan.keep)
        return {name: machine.vcpus * nodes for name, machine in self._machines.items()}

    @property
    def vcpus(self) -> int | None:
        """The quota that the cluster needs in its market, in vCPUs, with the largest of its types."""
        return max(self._vcpus_by_type.values(), default=None)

    def require_quota(self) -> None:
        """Raise :class:`UsageError` if the quota is known and too small for every requested type."""
        spec = self.plan_input.spec
        nodes = count_in_market(spec, self.plan.keep)
        require_quota(spec, nodes, self._vcpus_by_type, self.quota_held)

    def _usd_until(self, end: datetime) -> float:
        """Return the most that nodes can cost that shut down at ``end``; requires a known price."""
        most = find_most(self.plan_input, self.plan) if self.ctx.cloud.billed else Price(0.0, "")
        assert most
        return most.usd * max(0.0, (end + SHUTDOWN - self.ctx.now()).total_seconds() / 3600)

    @property
    def price(self) -> Price | None:
        """The cluster's on-demand price per hour, if the price in its region is known."""
        if not self.ctx.cloud.billed:
            return Price(0.0, "")
        return self.plan.price if self.plan.price and self.plan.price.is_here else None

    @property
    def usd_at_most(self) -> float | None:
        """The most that the nodes can cost until they shut down in any case, if all prices are known."""
        if self.price is None or self._loads_disks:
            return None
        return self._usd_until(self.plan_input.record.ends_at_most)

    @property
    def spoken_price(self) -> str:
        """The accepted price, for the event log."""
        if self.price is None:
            return "an unknown price"
        most = "" if self.usd_at_most is None else f", at most ${self.usd_at_most:.2f}"
        return f"${self.price.usd:.2f} an hour{most} ({self.price.source})"

    @property
    def _loads_disks(self) -> bool:
        """Whether AWS bills loading the disks; that price is not looked up."""
        rate = self.plan_input.spec.volume_init_rate
        return bool(self.ctx.cloud.billed and self.plan.buys and rate)

    @property
    def spot_usd(self) -> dict[str, float]:
        """Today's spot price of each way to buy, in the order they are tried."""
        prices, zones = self.plan_input.prices.spot, self.zones
        offers = [o.place for o in self.offers if o.market == SPOT and o.network.zone in zones]
        return {" in ".join(place): prices[place] for place in offers if place in prices}

    @property
    def warnings(self) -> list[str]:
        """Advice on the types."""
        texts = []
        for name, machine in self._machines.items():
            if machine.memory_gib < _SMALL_GIB:
                texts.append(
                    f"{name} has {machine.memory_gib:g} GiB of memory: too little to train BERT."
                )
            if machine.amx is None and self.plan_input.spec.amx_required:
                texts.append(
                    f"It is not known whether {name} has AMX: the nodes are checked after boot."
                )
        return texts

    @property
    def zones(self) -> list[str]:
        if self.plan.keep:
            return [self.plan.keep[0].zone]
        return list(dict.fromkeys(offer.network.zone for offer in self.offers))

    def as_dict(self) -> dict[str, Any]:
        """Return the proposal for ``--json``."""
        spec, plan, billed = self.plan_input.spec, self.plan, self.ctx.cloud.billed
        return {
            "cluster": spec.name,
            "cloud": self.ctx.cloud.name,
            "region": self.ctx.cloud.region,
            "nodes": spec.nodes,
            "changes": plan.changes,
            "actions": [
                {"kind": action.kind.name.lower(), "detail": action.detail, "ids": action.ids}
                for action in plan.actions
            ],
            "usd_per_hour": self.price and round(self.price.usd, 4),
            "usd_at_most": None if self.usd_at_most is None else round(self.usd_at_most, 2),
            "prices_as_of": plan.price.source if billed and plan.price else None,
            "price_problem": self.plan_input.prices.problem or None,
            "spot_usd_per_hour": self.spot_usd,
            "expires": render_time(self.plan_input.record.expires),
            "latest": render_time(self.plan_input.record.latest),
            "warnings": self.warnings,
            "quota": {
                "code": quota_code(spot=spec.spot) if is_standard(self._machines) else None,
                "vcpus_needed": self.vcpus,
                "vcpus_held": self.quota_held,
            },
            "zones": self.zones,
            "notes": list(self.notes),
            "minutes": plan.expected_min if billed else None,
        }

    def render(self) -> str:
        """Return the proposal in a few lines."""
        spec, cloud = self.plan_input.spec, self.ctx.cloud
        steps = [f"  {action.title}{self._expected(action)}" for action in self.plan.actions]
        head = f"Cluster {spec.name} of {counted(spec.nodes, 'node')}, {cloud.name} {cloud.region}"
        lines = [f"{head}:", *steps]
        if self.zones:
            lines.append(f"Zones, in the order they are tried: {', '.join(self.zones)}.")
        if self.plan.buys:
            lines.append(f"Software: {describe_software(load_stack(spec.stack))}")
        if cloud.billed:
            lines += [*self._installation(), *self._money()]
        expires = spoken_time(self.plan_input.record.expires, self.ctx.now())
        if self.plan_input.record.latest > self.plan_input.record.expires:
            ends = spoken_day(self.plan_input.record.grace_ends, self.ctx.now().date())
            expires += f" (up to {ends} if results wait for `fetch`)"
        idle = f", or after {render_duration(spec.idle_timeout)} idle" if spec.idle_timeout else ""
        lines.append(f"Nodes shut down automatically at {expires}{idle}.")
        if cloud.billed and self.plan.buys:
            lines.append(_GUARDED if spec.second_guard else _UNGUARDED)
        lines += self.notes
        return "\n".join(lines)

    def _expected(self, action: Action) -> str:
        if not self.ctx.cloud.billed or action.expected_min is None:
            return ""
        return "  [{} to {} min]".format(*action.expected_min)

    def _installation(self) -> list[str]:
        """Compare how long the ways to install the software take, if there is a choice."""
        installs = any(action.kind is ActionKind.INSTALL for action in self.plan.actions)
        if not installs or self.plan_input.spec.nodes == 1:
            return []
        times = expected_by_bake(self.plan_input)
        texts = {
            way: f"--bake {way} takes {low} to {high} min" for way, (low, high) in times.items()
        }
        chosen = self.plan_input.bake
        (other,) = times.keys() - {chosen}
        return [f"Installation: {texts[chosen]}; {texts[other]}."]

    def _money(self) -> list[str]:
        spec, prices = self.plan_input.spec, self.plan_input.prices
        lines = [*self._on_demand(), *self._spot(), *self._cheaper(), *self.warnings]
        if self.usd_at_most is not None:
            lines.append(self._at_most())
        if prices.problem:
            lines.append(f"Prices: {prices.problem}.")
        if not self.plan.buys or not is_standard(self._machines):
            return lines
        held = (
            f"unknown ({self.quota_problem})" if self.quota_held is None else str(self.quota_held)
        )
        quota = f"Quota {quota_code(spot=spec.spot)}: needs {self.vcpus} vCPUs, you have {held}."
        if self.quota_held is not None and self.vcpus and self.quota_held < self.vcpus:
            remedy = "request more in the console's Service Quotas first"
            if spec.on_demand_allowed:
                remedy = "EC2 refuses spot, and `up` buys on demand"
            quota += f" That is too few: {remedy}."
        return [*lines, quota]

    def _at_most(self) -> str:
        """Return the maximum cost until the end, with the grace period, and with the limit for jobs."""
        record, today = self.plan_input.record, self.ctx.now().date()
        until = self._usd_until(record.expires)
        text = f"At most ${until:.2f} until {spoken_day(record.expires, today)}"
        more = self._usd_until(record.grace_ends) - until
        if more > 0:
            grace = render_duration(record.options["grace"])
            text += f", and ${more:.2f} more if results wait for `fetch` (--grace {grace})"
        if record.bound:
            options = record.options
            flags = [
                OPTIONS[key].flag for key in ("max_time", "budget") if options[key] is not None
            ]
            text += (
                f"; at most ${self.usd_at_most:.2f} in all if jobs extend it, until "
                f"{spoken_day(record.bound, today)} ({', '.join(flags)})"
            )
        elif record.latest > record.grace_ends:
            text += (
                f"; at most ${self.usd_at_most:.2f} in all while a job with --max-time or --budget runs, "
                f"until {spoken_day(record.latest, today)}"
            )
        return f"{text}."

    def _on_demand(self) -> list[str]:
        """Return the price on demand, its parts, and its source."""
        spec, prices, total = self.plan_input.spec, self.plan_input.prices, self.plan.price
        region, names = self.ctx.cloud.region, " or ".join(self._machines)
        if total is None:
            return [f"Price: unknown for {names or ' or '.join(spec.instance_types)} in {region}."]
        disk = prices.disk(spec.volume_gib, **spec.disk_speed)
        beside = (disk.usd if disk else 0) + (0 if spec.private else ADDRESS_USD)
        parts = "disk" if spec.private else "disk and public address"
        machine = total.usd / spec.nodes - beside
        text = (
            f"${total.usd:.2f} an hour on demand: {spec.nodes} x ${machine:.4f}, plus ${beside:.4f} each for "
            f"{parts} ({total.source})"
        )
        if len(self._machines) > 1:
            text += ", for the most expensive of these types"
        if not total.is_here:
            return [f"Price: unknown in {region}. In {TABLE_REGION}: {text}."]
        extra = (
            "Image, traffic, and loading the disks" if self._loads_disks else "Image and traffic"
        )
        return [f"Price: {text}. {extra} are extra."]

    def _cheaper(self) -> list[str]:
        """Return a line about another type on which the same work costs much less, if there is one."""
        machines = list(self._machines.values())
        if not self.plan.buys or self.plan.keep or len(machines) != 1:
            return []
        (kind,) = machines
        prices = table_prices(TABLE_REGION, [*INSTANCE_TYPES])
        found = find_cheaper(kind, prices, _MUCH_CHEAPER)
        if found is None:
            return []
        best, share = found
        boots = f", and boots in {best.boot_minutes} min instead of {kind.boot_minutes}"
        return [
            f"On {best.name}, the same work costs {100 * (1 - share):.0f} % less by list prices and AMX peaks"
            f"{boots if best.boot_minutes < kind.boot_minutes else ''}: `spr-cluster types`."
        ]

    def _spot(self) -> list[str]:
        """Return today's spot price, in the first zone that is tried, and the maximum."""
        spec = self.plan_input.spec
        if not spec.spot or not self.plan.buys:
            return []
        is_capped = spec.max_price and not spec.on_demand_allowed
        limit = f" At most ${spec.max_price:g} for each machine." if is_capped else ""
        if not self.spot_usd:
            return [f"Spot: today's price is unknown, usually far less than on demand.{limit}"]
        where, usd = next(iter(self.spot_usd.items()))
        return [
            f"Spot: now ${usd:.4f} each ({where}, which is tried first; EC2's price history).{limit}"
        ]


def propose(ctx: Context, plan_input: PlanInput) -> Proposal:
    """Return a plan with its offers, prices, and quota. Changes nothing."""
    plan = plan_up(plan_input)
    left = plan_input.record.expires - ctx.now()
    least = max(_SHORTEST, timedelta(minutes=plan.start_min) + _SPARE)
    # A new cluster's time runs since some seconds ago.
    if plan.buys and ctx.cloud.billed and left < least - timedelta(minutes=1):
        hint = f"use --ttl {render_duration(least)} or more"
        if plan_input.found.alive:
            hint = f"spr-cluster extend 2h {ctx.flags}"
        elif plan_input.group:
            # For some minutes, a new try keeps the times of the last one.
            hint = f"remove what the last `up` left: spr-cluster down {ctx.flags}; then {hint}"
        raise UsageError(
            f"the time to live is only {left.total_seconds() / 60:.0f} min, and the last node may take "
            f"{plan.start_min} min to start",
            hint=hint,
        )
    stack = load_stack(plan_input.spec.stack) if plan.buys else None
    notes = [*summarize_state(stack)] if stack else []
    if large := plan_input.large_image:
        gib = large.volume_gib
        notes.append(f"Image {large.id} needs a disk of {gib} GiB: --volume-gib {gib} uses it.")
    if not plan_input.found.alive:
        notes += check_buckets(ctx.clients, plan_input.spec, ctx.cloud)
    offers = find_offers(ctx, plan_input, notes.append) if plan.buys else ()
    if stack and plan_input.image is None:
        find_ubuntu_image(ctx.clients.ssm, ctx.clients.ec2, stack.ubuntu)
    plan_input = replace(plan_input, prices=_find_prices(ctx, plan, offers))
    # Subnets that the user chose are tried in the user's order.
    if not plan_input.spec.subnet_ids:
        offers = cheapest_zone_first(offers, plan_input.prices.spot)
    plan = plan_up(plan_input)
    if plan_input.record.options["max_time"] or plan_input.record.options["budget"]:
        plan_input = replace(plan_input, record=_limit(plan_input, plan))
        plan = plan_up(plan_input)
    if plan.price and plan.buys and not ctx.cloud.billed:
        notes.append(_on_aws(plan_input, plan, plan.price, ctx.now()))
    if plan_input.record.options["budget"] and not ctx.cloud.billed:
        notes.append("--budget counts the price on AWS.")
    asks = plan.buys and ctx.cloud.billed and is_standard(plan_input.spec.instance_types)
    why, spot = list[str](), plan_input.spec.spot
    held = describe_quota(ctx.clients.quotas, spot=spot, why_not=why.append) if asks else None
    return Proposal(ctx, plan_input, plan, offers, held, "".join(why), notes)


def _on_aws(plan_input: PlanInput, plan: Plan, price: Price, now: datetime) -> str:
    """Return what the same cluster would cost on AWS, as text for a cloud that bills nothing."""
    spec, left = plan_input.spec, plan_input.record.ends_at_most + SHUTDOWN - now
    hourly = (find_most(plan_input, plan) or price).usd
    market = " on demand" if spec.spot else ""
    limit = f" with --max-price {spec.max_price:g}" if hourly != price.usd else ""
    most = f"at most ${hourly * left.total_seconds() / 3600:.2f}{limit}"
    return f"Free here. On AWS: about ${price.usd:.2f} an hour{market}, {most} ({price.source})."


def _limit(plan_input: PlanInput, plan: Plan) -> ClusterRecord:
    """Return the record with how far jobs may move the end. Raises :class:`UsageError` if it is later."""
    record, most = plan_input.record, find_most(plan_input, plan)
    if record.options["budget"] and (
        most is None or not most.is_here or plan_input.spec.volume_init_rate
    ):
        raise UsageError(
            "--budget: the price of these nodes is unknown, so it can't be kept",
            hint="use --max-time; --volume-init-rate has no known price",
        )
    group = plan_input.group
    old = parse_record(group.tags) if group else None
    nodes = plan_input.spec.nodes
    return limit_record(record, old, most.usd / nodes * record.dearest["nodes"] if most else 0.0)


def find_most(plan_input: PlanInput, plan: Plan) -> Price | None:
    """Return the most that the whole cluster can cost per hour, if the prices are known."""
    spec, kept = plan_input.spec, plan.keep
    types = (kept[0].instance_type,) if kept else spec.instance_types
    # Spot machines keep the maximum with which they were bought.
    node = plan_input.prices.most(types, plan_input.record.dearest)
    return node and replace(node, usd=node.usd * spec.nodes)


def _find_prices(ctx: Context, plan: Plan, offers: Sequence[Offer]) -> Prices:
    """Return the prices of the types that exist or are for sale here."""
    types = [machine.instance_type for machine in plan.keep] or [o.type.name for o in offers]
    if not ctx.cloud.billed:
        return table_prices(TABLE_REGION, types)
    prices = look_up_prices(ctx.cloud, ctx.clients, types, ctx.now())
    if any(offer.market == SPOT for offer in offers):
        return with_spot(prices, ctx.clients.ec2, ctx.now())
    return prices
