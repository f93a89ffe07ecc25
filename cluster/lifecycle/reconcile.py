"""Reconciliation: observe, plan, and apply until the cluster matches its specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from botocore.exceptions import ClientError

from cluster.context import Context
from cluster.lifecycle.apply import PlanApplier
from cluster.lifecycle.machines import PlanAgainError
from cluster.local_files import remembered_cloud
from cluster.nodes import Cluster
from infra import instances, key_pair, network, tags
from infra.actions import Action, ActionKind, Plan
from infra.clients import error_code
from infra.cluster_record import (
    ClusterRecord,
    deadline_tags,
    merge_options,
    new_record,
    parse_record,
)
from infra.errors import SprError, UsageError
from infra.images import describe_cached_images
from infra.instances import HEAD, describe_impaired
from infra.inventory import PLANNED_KINDS, Inventory, describe_inventory
from infra.network import SecurityGroup
from infra.ownership import ForeignClusterError, check_owner, split_groups
from infra.plan import PlanInput, check_head_is_not_stopped, plan_up
from infra.purchase import Offer, list_offers
from infra.removal import remove
from infra.spec import LONGEST_TTL, ClusterSpec
from infra.wait import SETTLE_S
from infra.words import counted, spoken_time
from provision.host import on_all
from provision.lifetime import extend_life
from provision.recipe import recipe_digest
from provision.stacks.load import load_stack, stack_names
from provision.stacks.stack import Stack

# Faulty machines are replaced. After this many times, the cause is something else.
_MOST_REPLACEMENTS = 2
_MOST_ROUNDS = 12
_LONGEST_PAUSE_S = 15.0
_MOST_INSTALLS = 32
# EC2's errors after another command removed the cluster.
_REMOVED = {"InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidKeyPair.NotFound"}


def observe(ctx: Context, cluster: str) -> Inventory:
    """Return what exists of a cluster, from its tags."""
    return describe_inventory(ctx.clients.ec2, cluster, PLANNED_KINDS)


def prepare(
    ctx: Context,
    cluster: str,
    given: Mapping[str, Any],
    ssh_cidr: str | None,
    *,
    wants_image: bool = False,
) -> PlanInput:
    """Return the specification and what exists, as the planner's input; nothing is changed.

    Without ``ssh_cidr``, the addresses that may use SSH are kept if they include this machine.
    Raises :class:`UsageError` for options that an existing cluster can't change to, or if this
    machine lacks the cluster's key.
    """
    found = observe(ctx, cluster)
    _check_other_clouds(ctx, cluster)
    public_key = key_pair.read_public(ctx.files.key)
    if found.alive and ctx.files.key.exists() and not public_key:
        raise ctx.missing_key()
    check_owner(cluster, found, public_key, ctx.now())
    group, _ = split_groups(found, public_key)
    record = parse_record(group.tags) if group else None
    defaults = {
        "stack": _kept_stack(ctx, found) or ctx.cloud.default_stack,
        "amx_required": ctx.cloud.has_amx,
        "bake": _default_bake(ctx, given),
    }
    spec = merge_options(cluster, ssh_cidr or _find_cidr(ctx, group), given, record, defaults)
    check_head_is_not_stopped(found)
    _check_existing(ctx, spec, found, record)
    unhealthy = {}
    if workers := [i.id for i in found.alive if i.role != HEAD]:
        impaired = describe_impaired(ctx.clients.ec2, workers)
        unhealthy = dict.fromkeys(impaired, "impaired, according to EC2's status checks")
    plan_input = PlanInput(
        spec=spec,
        record=new_record(spec, ctx.now(), record, has_machines=bool(found.alive)),
        found=found,
        recipe=_recipe(ctx, spec.stack),
        public_key=public_key,
        now=ctx.now(),
        unhealthy=unhealthy,
        wants_image=wants_image,
    )
    if (own := plan_input.own_image) and own.state == "available":
        return plan_input
    cached = describe_cached_images(ctx.clients.ec2, plan_input.software, spec.volume_gib)
    return replace(plan_input, cached=cached)


def _recipe(ctx: Context, stack: str) -> str:
    return recipe_digest(load_stack(stack), ctx.cloud.base)


def _default_bake(ctx: Context, given: Mapping[str, Any]) -> str:
    """Return the cloud's faster way, unless too many nodes would load from one package index."""
    return "head" if given.get("nodes", 1) > _MOST_INSTALLS else ctx.cloud.default_bake


def _kept_stack(ctx: Context, found: Inventory) -> str | None:
    """Return the stack of a kept image, which is the default of the next `up`."""
    installed = {image.tags.get(tags.INSTALLED) for image in found.images}
    names = stack_names() if installed else ()
    return next((name for name in names if _recipe(ctx, name) in installed), None)


def find_offers(ctx: Context, plan_input: PlanInput) -> tuple[Offer, ...]:
    """Every way to buy what is missing, before anything is made.

    Raises :class:`UsageError` if the region offers none.
    """
    spec, group = plan_input.spec, plan_input.group
    ec2 = ctx.clients.ec2
    support = network.describe_type_support(ec2, spec.instance_types)
    networks = network.describe_networks(ec2, spec.subnet_id, group.vpc_id if group else None)
    network.require_offers(spec, support, networks, ctx.cloud.region)
    return list_offers(spec, support, networks)


def _find_cidr(ctx: Context, group: SecurityGroup | None) -> str:
    """Return the caller's address, or the existing wider range that includes it."""
    caller = ctx.cloud.caller_cidr()
    return group.cidr_for(caller) if group else caller


def _check_other_clouds(ctx: Context, cluster: str) -> None:
    elsewhere = remembered_cloud(cluster)
    if elsewhere and elsewhere != (ctx.cloud.name, ctx.cloud.region) and ctx.files.key.exists():
        raise UsageError(
            f"this machine has the key of another cluster {cluster!r}, in {' '.join(elsewhere)}",
            hint=f"choose another --name, or remove that cluster: spr-cluster down --name {cluster} "
            f"--cloud {elsewhere[0]} --region {elsewhere[1]}",
        )


def _check_existing(
    ctx: Context, spec: ClusterSpec, found: Inventory, record: ClusterRecord | None
) -> None:
    if not found.alive:
        return
    types = {instance.instance_type for instance in found.alive}
    if foreign := types - set(spec.instance_types):
        raise UsageError(
            f"--instance-type {','.join(spec.instance_types)}: the machines of cluster "
            f"{spec.name!r} are {', '.join(sorted(foreign))}",
            hint=f"leave --instance-type out, or start over: spr-cluster down {ctx.flags}",
        )
    if record and record.is_over(ctx.now()):
        raise _time_is_over(ctx, spec.name)


def _time_is_over(ctx: Context, cluster: str) -> SprError:
    return SprError(
        f"the time to live of cluster {cluster!r} is over; its nodes are shutting down",
        hint=f"in two minutes, `spr-cluster up {ctx.flags}` creates a new one; "
        f"to remove the rest: spr-cluster down {ctx.flags}",
    )


def bring_up(
    ctx: Context,
    plan_input: PlanInput,
    plan: Plan,
    offers: Callable[[], Sequence[Offer]],
    on_new_plan: Callable[[PlanInput, Plan, str], None] = lambda _input, _plan, _reason: None,
) -> Cluster:
    """Apply a plan; if it no longer fits what exists, observe and plan again, a bounded number of times.

    Raises :class:`SprError` naming the machines that are faulty even after replacement.
    """
    try:
        return _bring_up(ctx, plan_input, plan, offers, on_new_plan)
    except ForeignClusterError:
        _withdraw(ctx, plan_input)
        raise


def _withdraw(ctx: Context, plan_input: PlanInput) -> None:
    """Remove what this command made before another one turned out to own the cluster."""
    if plan_input.group is not None:
        return
    found = observe(ctx, plan_input.spec.name)
    public_key = key_pair.read_public(ctx.files.key)
    own = key_pair.fingerprint(public_key)
    for group in found.security_groups:
        if group.tags.get(tags.OWNER_KEY) == own:
            remove(ctx.clients.ec2, Action(ActionKind.DELETE_GROUPS, group.id, (group.id,)))
    if not plan_input.public_key:
        ctx.files.remove()


def _bring_up(
    ctx: Context,
    plan_input: PlanInput,
    plan: Plan,
    offers: Callable[[], Sequence[Offer]],
    on_new_plan: Callable[[PlanInput, Plan, str], None],
) -> Cluster:
    stack: Stack = load_stack(plan_input.spec.stack)
    replacements, had_group = 0, plan_input.group is not None
    if plan_input.found.security_groups and plan.changes:
        # A new group is a claim by itself.
        _require_unchanged(ctx, plan_input, written=0)
    reason = _first_reason(plan_input)
    for number in range(_MOST_ROUNDS):
        _record_plan(ctx, plan_input, plan, reason)
        try:
            return PlanApplier(ctx, plan_input, stack, plan, offers).apply()
        except ClientError as error:
            if error_code(error) in _REMOVED:
                _require_group(ctx, plan_input)
            raise
        except PlanAgainError as again:
            reason = str(again)
            replacements += bool(again.unhealthy) and not again.is_move
            if replacements > _MOST_REPLACEMENTS:
                break
            unhealthy = {**plan_input.unhealthy, **again.unhealthy}
            if not again.unhealthy:
                # EC2 takes seconds to list resources that were just created or deleted.
                ctx.clock.sleep(min(2.0**number, _LONGEST_PAUSE_S))
        plan_input = _require_unchanged(
            ctx, replace(plan_input, unhealthy=unhealthy), written=1, had_group=had_group
        )
        had_group = had_group or plan_input.group is not None
        plan = plan_up(plan_input)
        on_new_plan(plan_input, plan, reason)
    raise SprError(
        f"the cluster did not come up: {reason}",
        hint="try another --instance-type or --region; "
        f"`spr-cluster ssh {ctx.flags}` into a node may show more"
        if replacements
        else "a resource without the cluster's tag has the same name: remove it, or choose another --name",
    )


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
        usd_per_hour=round(plan.usd_per_hour, 4) if ctx.cloud.billed else 0.0,
        expires=tags.render_time(plan_input.record.expires),
    )


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
    """Return the same wish with what exists now. Raises :class:`SprError` if it may not be changed."""
    found = observe(ctx, plan_input.spec.name)
    public_key = key_pair.read_public(ctx.files.key)
    check_owner(plan_input.spec.name, found, public_key, ctx.now())
    check_head_is_not_stopped(found, plan_input.unhealthy)
    again = replace(plan_input, found=found, public_key=public_key, now=ctx.now())
    written = parse_record(again.group.tags) if again.group else None
    generation = written.generation if written else plan_input.record.generation
    return replace(again, record=replace(plan_input.record, generation=generation))


def _require_group(ctx: Context, plan_input: PlanInput) -> None:
    """Raise :class:`SprError` if a `down` deleted the cluster's group."""
    ctx.clock.sleep(SETTLE_S)
    if _observe_again(ctx, plan_input).group is None:
        raise SprError(
            "the cluster was removed in the meantime: its security group is gone",
            hint=f"to create it again: spr-cluster up {ctx.flags}",
        )


def extend(ctx: Context, cluster: str, more: timedelta) -> ClusterRecord:
    """Extend a cluster's time to live, in its tags and then on its nodes."""
    nodes = ctx.find_cluster().nodes
    found = describe_inventory(ctx.clients.ec2, cluster, ("security_groups",))
    if found.group is None or found.record is None:
        raise SprError(f"cluster {cluster!r} has no record", hint=f"spr-cluster up {ctx.flags}")
    if found.record.is_over(ctx.now()):
        raise _time_is_over(ctx, cluster)
    expires = found.record.expires + more
    record = replace(found.record, expires=expires, generation=found.record.generation + 1)
    if record.expires - ctx.now() > LONGEST_TTL:
        raise UsageError(
            f"cluster {cluster!r} would live until {spoken_time(record.expires, ctx.now())}; "
            "the maximum is 30 days from now",
            hint=f"its nodes shut down at {spoken_time(found.record.expires, ctx.now())} now",
        )
    open_host = ctx.host_opener()
    hosts = [open_host(node) for node in nodes]
    hint = (
        "the tags have the new time, but some nodes still have the old one: "
        f"`spr-cluster extend 1m {ctx.flags}` sets it on all nodes; "
        f"`spr-cluster repair {ctx.flags}` replaces lost nodes"
    )
    with ctx.progress.phase(f"Extend until {spoken_time(record.expires, ctx.now())}"):
        # The tags first: if they named an earlier time than the nodes, `gc` would remove a live cluster.
        instances.label_instances(ctx.clients.ec2, [found.group.id], deadline_tags(record))
        ids = [node.instance.id for node in nodes]
        label = {tags.EXPIRES: tags.render_time(record.expires)}
        instances.label_instances(ctx.clients.ec2, ids, label)
        on_all("extending", hosts, lambda host: extend_life(host, record.expires), hint=hint)
    until = tags.render_time(record.expires)
    resources = [found.group.id, *ids]
    ctx.events.record("extended", f"until {until}", resources=resources, expires=until)
    return record
