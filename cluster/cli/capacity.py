"""``up --wait-for-capacity``: try again until EC2 has room for all machines, or the time has passed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from cluster.cli.proposal import Proposal
from cluster.console.display import format_seconds
from cluster.context import Context
from cluster.lifecycle.prepare import observe
from cluster.nodes import Cluster
from infra.ec2.instances import UNBILLED
from infra.ec2.purchase import NoCapacityError
from infra.plan.actions import Action, ActionKind
from infra.plan.removal import remove
from infra.words import render_duration

_FIRST_S, _LONGEST_S, _GROWTH = 30.0, 300.0, 1.6


@dataclass(frozen=True)
class CapacityWait:
    """How long to try. ``plan_again`` returns the plan for what exists then, with a new deadline."""

    limit: timedelta
    plan_again: Callable[[], Proposal]


def bring_up_when_possible(
    proposal: Proposal, wait: CapacityWait | None, bring_up: Callable[[Proposal], Cluster]
) -> Cluster:
    """Apply a proposal, repeatedly while no zone, type, or market has room for all machines.

    The machines of a failed try are terminated before the next one. Raises :class:`NoCapacityError` when
    the time has passed, immediately if only another quota would help, and after a try that spent part of
    a new cluster's ``--budget``, which the next one would have in full.
    """
    ctx = proposal.ctx
    kept = {instance.id for instance in proposal.plan_input.found.alive}
    # A monotonic clock stands still while a laptop sleeps.
    begun, pause = ctx.now(), _FIRST_S
    while True:
        if wait:
            left = (begun + wait.limit - ctx.now()).total_seconds()
            given = proposal.plan_input
            given = replace(given, end_wait_s=min(given.end_wait_s, max(0.0, left)))
            proposal = replace(proposal, plan_input=given)
        try:
            return bring_up(proposal)
        except NoCapacityError as full:
            if wait is None or not full.may_pass:
                raise
            _terminate_new(ctx, kept)
            passed = (ctx.now() - begun).total_seconds()
            left = wait.limit.total_seconds() - passed
            # The budget of a cluster that exists is not restarted.
            is_new = proposal.plan_input.spec.budget and not proposal.plan_input.found.alive
            if is_new and ctx.events.ran(begun.replace(microsecond=0)):
                left, full.hint = 0, f"this try spent part of --budget; {full.hint}"
            if left > 0:
                seconds = min(left, _LONGEST_S, pause * random.uniform(0.7, 1.3))
                _note(proposal, wait, full, passed, seconds)
                ctx.clock.sleep(seconds)
                passed = (ctx.now() - begun).total_seconds()
            if left <= 0 or passed > wait.limit.total_seconds() + _FIRST_S:
                full.hint = f"waited {format_seconds(passed)}; {full.hint}"
                raise
        pause *= _GROWTH
        proposal = wait.plan_again()


def _terminate_new(ctx: Context, kept: set[str]) -> None:
    """Terminate what this command bought for only a part of the cluster."""
    found = observe(ctx).alive
    if ids := tuple(instance.id for instance in found if instance.id not in kept):
        action = Action(ActionKind.TERMINATE, ", ".join(ids), ids)
        with ctx.perform(action):
            remove(ctx.clients.ec2, action, ctx.clock, until=UNBILLED)


def _note(
    proposal: Proposal, wait: CapacityWait, full: NoCapacityError, passed: float, seconds: float
) -> None:
    ctx, price = proposal.ctx, proposal.price
    cost = f", for ${price.usd:.2f} an hour once they run" if price and ctx.cloud.billed else ""
    tried = ", ".join(dict.fromkeys(" in ".join(each.offer.place) for each in full.refusals))
    ctx.progress.note(
        f"no capacity after {format_seconds(passed)} of {render_duration(wait.limit)} ({tried}); "
        f"next try in {format_seconds(seconds)}{cost}; Ctrl-C leaves no new machines"
    )
    ctx.events.record("waiting", f"for capacity, {format_seconds(passed)} so far", reason=full.code)
