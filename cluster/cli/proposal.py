"""Proposal that ``plan`` and ``up`` show before buying: actions, price, quota, zones, and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cluster.context import Context
from cluster.lifecycle.prepare import find_offers
from infra.actions import Action, ActionKind, Plan
from infra.errors import UsageError
from infra.guard import COST
from infra.instance_types import PRICES_AS_OF, find_instance_type
from infra.plan import PlanInput, expected_by_bake, plan_up
from infra.purchase import Offer
from infra.quotas import describe_quota, quota_code
from infra.spec import render_duration
from infra.tags import render_time
from infra.words import counted, spoken_time

# A cluster that lives less would be paid for and gone before it could be used.
_SHORTEST = timedelta(minutes=30)
_GUARDED = f"Second guard: terminated from outside if they do not ({COST})."
_UNGUARDED = (
    "A machine that never boots does not shut down: --second-guard has AWS terminate it, too "
    f"({COST})."
)


@dataclass(frozen=True)
class Proposal:
    """A plan with everything that a user needs to know before confirming."""

    ctx: Context
    plan_input: PlanInput
    plan: Plan
    offers: Sequence[Offer]
    quota_held: int | None
    notes: Sequence[str] = ()
    """What may stand in the way of the purchase."""

    @property
    def _vcpus_by_type(self) -> dict[str, int]:
        kept, spec = self.plan.keep, self.plan_input.spec
        machines = [find_instance_type(kept[0].instance_type)] if kept else spec.types
        return {machine.name: machine.vcpus * spec.nodes for machine in machines}

    @property
    def vcpus(self) -> int:
        """vCPUs that the whole cluster needs of the quota, with the largest of its types."""
        return max(self._vcpus_by_type.values())

    def require_quota(self) -> None:
        """Raise :class:`UsageError` if the quota is known and too small for every requested type."""
        spec, held = self.plan_input.spec, self.quota_held
        name, least = min(self._vcpus_by_type.items(), key=lambda item: item[1])
        if held is None or held >= least or (spec.spot and spec.on_demand_allowed):
            return
        raise UsageError(
            f"quota {quota_code(spot=spec.spot)} is {held} vCPUs: {counted(spec.nodes, 'node')} of {name} "
            f"need {least}",
            hint="request more in the console's Service Quotas, or use fewer --nodes or a smaller "
            "--instance-type",
        )

    @property
    def hours_left(self) -> float:
        left = self.plan_input.record.expires - self.ctx.now()
        return max(0.0, left.total_seconds() / 3600)

    @property
    def usd_at_most(self) -> float:
        return self.plan.usd_per_hour * self.hours_left if self.ctx.cloud.billed else 0.0

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
            "usd_per_hour": round(plan.usd_per_hour, 4) if billed else 0.0,
            "usd_at_most": round(self.usd_at_most, 2),
            "prices_as_of": PRICES_AS_OF,
            "expires": render_time(self.plan_input.record.expires),
            "quota": {
                "code": quota_code(spot=spec.spot),
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
        if cloud.billed:
            lines += [*self._software(), *self._money()]
        expires = spoken_time(self.plan_input.record.expires, self.ctx.now())
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

    def _software(self) -> list[str]:
        """Return how long each way to install the software takes, if there is a choice."""
        installs = any(action.kind is ActionKind.INSTALL for action in self.plan.actions)
        if not installs or self.plan_input.spec.nodes == 1:
            return []
        times = expected_by_bake(self.plan_input)
        texts = {
            way: f"--bake {way} takes {low} to {high} min" for way, (low, high) in times.items()
        }
        chosen = self.plan_input.bake
        (other,) = times.keys() - {chosen}
        return [f"Software: {texts[chosen]}; {texts[other]}."]

    def _money(self) -> list[str]:
        spec, plan = self.plan_input.spec, self.plan
        each = plan.usd_per_hour / spec.nodes
        market = ""
        if spec.spot:
            ceiling = f"at most ${spec.max_price:g} each" if spec.max_price else "usually far less"
            market = f" on demand; on spot {ceiling}"
        several = len(spec.types) > 1 and not plan.keep
        if several:
            market += ", for the most expensive of these types"
        lines = [
            f"Price: ${plan.usd_per_hour:.2f} an hour ({spec.nodes} x ${each:.4f}, "
            f"{PRICES_AS_OF}){market}, plus disks, image, and traffic.",
            f"At most ${self.usd_at_most:.2f} until the nodes shut down.",
        ]
        held = "unknown (no permission to ask)" if self.quota_held is None else str(self.quota_held)
        quota = f"Quota {quota_code(spot=spec.spot)}: needs {self.vcpus} vCPUs, you have {held}."
        if self.quota_held is not None and self.quota_held < self.vcpus:
            quota += " That is too few: request more in the console's Service Quotas first."
        return [*lines, quota]


def propose(ctx: Context, plan_input: PlanInput) -> Proposal:
    """Return a plan with its offers and quota; nothing is changed."""
    plan = plan_up(plan_input)
    left = plan_input.record.expires - ctx.now()
    if plan.buys and ctx.cloud.billed and left < _SHORTEST:
        raise UsageError(
            f"the time to live is only {left.total_seconds() / 60:.0f} min: bare metal may take that "
            "long to start",
            hint=f"new cluster: --ttl {render_duration(_SHORTEST)} or more; existing cluster: "
            f"spr-cluster extend 2h {ctx.flags}",
        )
    notes: list[str] = []
    offers = find_offers(ctx, plan_input, notes.append) if plan.buys else ()
    asks = plan.buys and ctx.cloud.billed
    held = describe_quota(ctx.clients.quotas, spot=plan_input.spec.spot) if asks else None
    return Proposal(ctx, plan_input, plan, offers, held, notes)
