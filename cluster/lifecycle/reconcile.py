"""Reconciliation: plan and apply until the cluster matches its specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from botocore.exceptions import ClientError

from cluster.context import Context
from cluster.lifecycle.apply import BeforeImage, PlanApplier
from cluster.lifecycle.machines import PlanAgainError
from cluster.lifecycle.prepare import observe
from cluster.nodes import Cluster
from infra.aws.clients import error_code
from infra.cost.prices import Price
from infra.ec2 import key_pair, tags
from infra.ec2.cluster_record import parse_record
from infra.ec2.purchase import Offer
from infra.errors import SprError, UsageError
from infra.plan.actions import Action, ActionKind, Plan
from infra.plan.ownership import ForeignClusterError, check_owner
from infra.plan.planner import PlanInput, check_head_is_not_stopped, plan_up
from infra.plan.removal import remove
from infra.spec import or_other_name
from infra.words import counted
from provision.stacks.load import load_stack

# After replacing faulty machines this many times, the cause is something else.
_MOST_REPLACEMENTS = 2
_MOST_ROUNDS = 12
_LONGEST_PAUSE_S = 15.0
# EC2's errors after another command removed the cluster.
_REMOVED = {"InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidKeyPair.NotFound"}


def bring_up(
    ctx: Context,
    plan_input: PlanInput,
    plan: Plan,
    offers: Callable[[], Sequence[Offer]],
    on_new_plan: Callable[[PlanInput, Plan, str], None] = lambda _input, _plan, _reason: None,
    before_image: BeforeImage = lambda _: None,
) -> Cluster:
    """Apply a plan. If it no longer fits what exists, observe and plan again, a limited number of times.

    Raises :class:`SprError` naming the machines that are faulty even after replacement.
    """
    with _withdrawing(ctx, plan_input):
        stack = load_stack(plan_input.spec.stack)
        replacements, had_group = 0, plan_input.group is not None
        if plan_input.found.security_groups and plan.changes:
            # A new group is a claim by itself.
            _require_unchanged(ctx, plan_input, written=0)
        reason = _first_reason(plan_input)
        number = 0
        while number < _MOST_ROUNDS:
            _record_plan(ctx, plan_input, plan, reason)
            try:
                return PlanApplier(ctx, plan_input, stack, plan, offers, before_image).apply()
            except ClientError as error:
                if error_code(error) in _REMOVED:
                    _require_group(ctx, plan_input)
                raise
            except PlanAgainError as again:
                reason = str(again)
                replacements += bool(again.unhealthy) and not again.is_move
                if replacements > _MOST_REPLACEMENTS:
                    break
                plan_input = replace(
                    plan_input,
                    unhealthy={**plan_input.unhealthy, **again.unhealthy},
                    refused=(*plan_input.refused, *again.refused),
                )
                if not again.unhealthy:
                    # EC2 takes seconds to list resources that were just created or deleted.
                    ctx.clock.sleep(min(2.0**number, _LONGEST_PAUSE_S))
                # Each offer is refused only once.
                number += not again.refused
            plan_input = _require_unchanged(ctx, plan_input, written=1, had_group=had_group)
            had_group = had_group or plan_input.group is not None
            plan = plan_up(plan_input)
            on_new_plan(plan_input, plan, reason)
    raise SprError(
        f"the cluster did not come up: {reason}",
        hint="try another --instance-type or --region; "
        f"`spr-cluster ssh {ctx.flags}` into a node may show more"
        if replacements
        else f"{or_other_name(ctx.name)}remove the resource without the cluster's tag that has its name",
    )


@contextmanager
def _withdrawing(ctx: Context, plan_input: PlanInput) -> Iterator[None]:
    """Remove what this command has created if it finds that another owns the cluster."""
    try:
        yield
    except ForeignClusterError:
        if plan_input.group is not None:
            raise
        found = observe(ctx)
        public_key = key_pair.read_public(ctx.files.key)
        own = key_pair.fingerprint(public_key)
        for group in found.security_groups:
            if group.tags.get(tags.OWNER_KEY) == own:
                remove(ctx.clients.ec2, Action(ActionKind.DELETE_GROUPS, group.id, (group.id,)))
        if not plan_input.public_key:
            ctx.files.remove()
        raise


def _first_reason(plan_input: PlanInput) -> str:
    """Return what the first plan has to change, as the event log's reason."""
    alive, nodes = plan_input.found.alive, plan_input.spec.nodes
    running = sum(instance.state == "running" for instance in alive)
    faults = "".join(f"; {id_}: {why}" for id_, why in plan_input.unhealthy.items())
    return f"{running} of {counted(nodes, 'node')} running{faults}"


def _record_plan(ctx: Context, plan_input: PlanInput, plan: Plan, reason: str) -> None:
    spec = plan_input.spec
    ctx.events.record(
        "plan",
        f"{counted(spec.nodes, 'node')} in {ctx.cloud.name} {ctx.cloud.region}",
        reason=reason,
        resources=[instance.id for instance in plan.keep],
        actions=[action.title for action in plan.actions],
        options=spec.model_dump(mode="json", exclude={"name"}),
        **_cost(ctx, plan),
        expires=tags.render_time(plan_input.record.expires),
    )


def _cost(ctx: Context, plan: Plan) -> dict[str, Any]:
    """Return the price for the event log: 0 where nothing is billed, ``None`` if it is unknown."""
    price = plan.price if ctx.cloud.billed else Price(0.0, "")
    here = price if price and price.is_here else None
    return {"usd_per_hour": here and round(here.usd, 4), "price_source": here and here.source}


def _require_unchanged(
    ctx: Context, plan_input: PlanInput, *, written: int, had_group: bool | None = None
) -> PlanInput:
    """Observe again, and return the input of the next plan.

    This command itself has changed the cluster at most ``written`` times since the last observation.
    Raises :class:`UsageError` if another one did, or if it owns or removed the cluster.
    """
    again = _observe_again(ctx, plan_input)
    had_group = plan_input.group is not None if had_group is None else had_group
    if again.group is None and had_group:
        _require_group(ctx, plan_input)
    changes = again.record.generation - plan_input.record.generation
    if not 0 <= changes <= written:
        raise UsageError(
            f"another command changed cluster {plan_input.spec.name!r} since this plan was made; "
            "this command changes nothing more",
            hint="run the same command again: it makes a new plan",
        )
    return again


def _observe_again(ctx: Context, plan_input: PlanInput) -> PlanInput:
    """Return the same request with what exists now. Raises :class:`SprError` if it must not change."""
    found = observe(ctx)
    public_key = key_pair.read_public(ctx.files.key)
    check_owner(plan_input.spec.name, found, public_key, ctx.now())
    region, given_up = ctx.cloud.region, plan_input.unhealthy
    check_head_is_not_stopped(found, ctx.flags, region, ctx.now(), given_up)
    spec, moved = plan_input.spec, ctx.access.moved_to
    if moved:
        others = (cidr for cidr in spec.ssh_cidrs if cidr not in (spec.caller, moved))
        spec = spec.model_copy(update={"ssh_cidrs": (*others, moved), "caller": moved})
    again = replace(plan_input, spec=spec, found=found, public_key=public_key, now=ctx.now())
    written = parse_record(again.group.tags) if again.group else None
    generation = written.generation if written else plan_input.record.generation
    record = replace(plan_input.record.joined(written), generation=generation)
    return replace(again, record=record)


def _require_group(ctx: Context, plan_input: PlanInput) -> None:
    """Raise :class:`SprError` if a `down` deleted the cluster's group."""
    ctx.clock.sleep(ctx.cloud.settle_s)
    if _observe_again(ctx, plan_input).group is None:
        raise SprError(
            "the cluster was removed in the meantime: its security group is gone",
            hint=f"to create it again: spr-cluster up {ctx.flags}",
        )
