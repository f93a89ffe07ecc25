"""What ``plan`` and ``up`` show before anything is bought: the actions, money, quota, zones, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cluster.context import Context
from cluster.lifecycle.reconcile import find_offers
from infra.actions import Action, ActionKind, Plan
from infra.errors import UsageError
from infra.instance_types import PRICES_AS_OF, find_instance_type
from infra.plan import PlanInput, expected_by_bake, plan_up
from infra.purchase import Offer
from infra.quotas import describe_quota, quota_code
from infra.spec import render_duration
from infra.tags import render_time

# What is bought for less is paid for and gone before it could be used.
_SHORTEST = timedelta(minutes=30)


def count(number: int, thing: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


@dataclass(frozen=True)
class Proposal:
    """A plan with everything that a user wants to know before saying yes."""

    ctx: Context
    plan_input: PlanInput
    plan: Plan
    offers: Sequence[Offer]
    quota_held: int | None

    @property
    def _vcpus_by_type(self) -> dict[str, int]:

        kept, spec = self.plan.keep, self.plan_input.spec
        machines = [find_instance_type(kept[0].instance_type)] if kept else spec.machines
        return {machine.name: machine.vcpus * spec.nodes for machine in machines}

    @property
    def vcpus(self) -> int:
        """vCPUs that the whole cluster counts against the quota, with the largest of its types."""
        return max(self._vcpus_by_type.values())

    def require_quota(self) -> None:
        """Raises :class:`UsageError` where the quota is known and no type of the wish fits into it."""

        spec, held = self.plan_input.spec, self.quota_held
        name, least = min(self._vcpus_by_type.items(), key=lambda item: item[1])
        if held is None or held >= least or (spec.spot and spec.on_demand_allowed):
            return
        raise UsageError(
            f"quota {quota_code(spot=spec.spot)} is {held} vCPUs: {count(spec.nodes, 'node')} of {name} "
            f"need {least}",
            hint="ask for more in the console's Service Quotas, or take fewer --nodes or a smaller "
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
        """The proposal for ``--json``."""

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
            "minutes": plan.expected_min if billed else None,
        }

    def render(self) -> str:
        """The proposal in a few lines."""
        spec, cloud = self.plan_input.spec, self.ctx.cloud
        steps = [f"  {action.title}{self._expected(action)}" for action in self.plan.actions]
        head = f"Cluster {spec.name} of {count(spec.nodes, 'node')}, {cloud.name} {cloud.region}"
        lines = [f"{head}:", *steps]
        if self.zones:
            lines.append(f"Zones, in the order in which they are tried: {', '.join(self.zones)}.")
        if cloud.billed:
            lines += [*self._way(), *self._money()]
        until = (
            f"{self.hours_left:.3g} h from now, at {render_time(self.plan_input.record.expires)}"
        )
        idle = ", or after being idle" if spec.idle_timeout else ""
        lines.append(f"The nodes end themselves {until}{idle}, or at `spr-cluster down`.")
        return "\n".join(lines)

    def _expected(self, action: Action) -> str:
        if not self.ctx.cloud.billed or action.expected_min is None:
            return ""
        return "  [{} to {} min]".format(*action.expected_min)

    def _way(self) -> list[str]:
        """The two ways to the software, where there is a choice."""

        installs = any(action.kind is ActionKind.INSTALL for action in self.plan.actions)
        if not installs or self.plan_input.spec.nodes == 1:
            return []
        times = expected_by_bake(self.plan_input)
        told = {
            way: f"--bake {way} takes {low} to {high} min" for way, (low, high) in times.items()
        }
        chosen = self.plan_input.bake
        (other,) = times.keys() - {chosen}
        return [f"Way to the software: {told[chosen]}; {told[other]}."]

    def _money(self) -> list[str]:

        spec, plan = self.plan_input.spec, self.plan
        each = plan.usd_per_hour / spec.nodes
        market = ""
        if spec.spot:
            ceiling = f"at most ${spec.max_price:g} each" if spec.max_price else "usually far less"
            market = f" on demand; on spot {ceiling}"
        several = len(spec.machines) > 1 and not plan.keep
        if several:
            market += ", for the dearest of these types"
        lines = [
            f"Price: ${plan.usd_per_hour:.2f} an hour ({spec.nodes} x ${each:.4f}, "
            f"{PRICES_AS_OF}){market}; disks, image and traffic besides.",
            f"At most ${self.usd_at_most:.2f} until the nodes end themselves.",
        ]
        held = "unknown (no permission to ask)" if self.quota_held is None else str(self.quota_held)
        quota = f"Quota {quota_code(spot=spec.spot)}: needs {self.vcpus} vCPUs, you have {held}."
        if self.quota_held is not None and self.quota_held < self.vcpus:
            quota += " That is too few: ask for more in the console's Service Quotas first."
        return [*lines, quota]


def propose(ctx: Context, plan_input: PlanInput) -> Proposal:
    """Plan, and ask what the plan's purchases need to know; nothing is changed."""

    plan = plan_up(plan_input)
    left = plan_input.record.expires - ctx.now()
    if plan.buys and ctx.cloud.billed and left < _SHORTEST:
        raise UsageError(
            f"only {left.total_seconds() / 60:.0f} min to live: bare metal may take that long to "
            "start",
            hint=f"--ttl of {render_duration(_SHORTEST)} or more for a new cluster; for one that "
            f"exists, first: spr-cluster extend 2h {ctx.flags}",
        )
    offers = find_offers(ctx, plan_input) if plan.buys else ()
    asks = plan.buys and ctx.cloud.billed
    held = describe_quota(ctx.clients.quotas, spot=plan_input.spec.spot) if asks else None
    return Proposal(ctx, plan_input, plan, offers, held)
