"""The input of a plan: the desired cluster, what exists, and the ways to buy what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cluster.context import Context
from cluster.lifecycle.reach import find_impaired
from cluster.nodes import describe_stuck
from infra.ec2 import key_pair, network, tags
from infra.ec2.cluster_record import ClusterRecord, merge_options, new_record, parse_record
from infra.ec2.images import describe_cached_images
from infra.ec2.instances import HEAD, Instance, describe_spot_notices
from infra.ec2.inventory import (
    PLANNED_KINDS,
    Inventory,
    describe_inventory,
    describe_terminated,
)
from infra.ec2.network import SecurityGroup
from infra.ec2.network_acls import install_flows, require_open_acls, ssh_flows
from infra.ec2.purchase import Offer, list_offers
from infra.ec2.reservations import Reservation, find_open_reservations, find_reservation
from infra.ec2.routes import describe_vpc_cidrs, require_jump, require_s3, require_ways
from infra.ec2.termination_schedule import is_guarded, with_guard
from infra.errors import SprError, UsageError
from infra.iam.instance_profile import has_profile, with_profile
from infra.plan.ownership import check_owner, split_groups
from infra.plan.planner import PlanInput, check_head_is_not_stopped
from infra.spec import (
    AUTO,
    ClusterChange,
    ClusterSpec,
    default_throughput,
    parse_ssh_cidr,
)
from provision.bake import recipe_digest
from provision.jump import require_way
from provision.stacks.load import DEFAULT_STACK, load_stack, stack_names

_MOST_INSTALLS = 32


def observe(
    ctx: Context, kinds: Iterable[str] = PLANNED_KINDS, *, is_certain: bool = True
) -> Inventory:
    """Return what exists of a cluster, from its tags, with the second guard and role that it records.

    Unless ``is_certain``, omits these two without permission to look.
    """
    found = describe_inventory(ctx.clients.ec2, ctx.name, kinds)
    if is_guarded(found):
        found = with_guard(ctx.clients, ctx.name, found, is_certain=is_certain)
    if has_profile(found):
        found = with_profile(ctx.clients, ctx.name, found, is_certain=is_certain)
    return found


def prepare(
    ctx: Context,
    change: ClusterChange,
    ssh_cidr: str | None,
    *,
    wants_image: bool = False,
    packages: str = "",
    unless_recorded: Mapping[str, Any] = MappingProxyType({}),
) -> PlanInput:
    """Return the specification and what exists, as the planner's input. Changes nothing.

    ``unless_recorded`` has the command's own defaults for a new cluster. Without ``ssh_cidr``, keep the
    ranges that the user chose, and add this machine's address unless they cover it.
    Raises :class:`UsageError` for options that an existing cluster can't change to, or if this
    machine lacks the cluster's key.
    """
    found = observe(ctx)
    ctx.require_own_files()
    public_key = key_pair.read_public(ctx.files.key)
    if ctx.files.key.exists() and (found.alive or public_key):
        ctx.require_key()
    check_owner(ctx.name, found, public_key, ctx.now(), ctx.flags)
    group, _ = split_groups(found, public_key)
    record = parse_record(group.tags) if group else None
    defaults = {
        "stack": _kept_stack(ctx, found) or DEFAULT_STACK,
        "amx_required": ctx.cloud.has_amx,
        # The cloud's faster way, unless too many nodes would load from one package index.
        "bake": "head" if change.nodes > _MOST_INSTALLS else ctx.cloud.default_bake,
        "volume_throughput": default_throughput(
            unless_recorded.get("instance_types", change.instance_types)
        ),
        **unless_recorded,
    }
    options = {**(record.options if record else {}), **change.given}
    if options.get("private") or options.get("jump"):
        cidrs, caller = _find_private_cidrs(ctx, group, ssh_cidr, options.get("subnet_ids", ())), ""
    else:
        cidrs, caller = _find_cidrs(ctx, group, ssh_cidr)
    spec = merge_options(ctx.name, cidrs, change.given, record, defaults, caller)
    # Only a budget depends on it.
    bought = _count_bought(ctx, record, found) if record and spec.budget else None
    new = new_record(spec, ctx.now(), record, has_machines=bool(found.alive), bought=bought)
    _require_new_budget(ctx, change, record, new, bought)
    ctx.clients.labels = dict(spec.labels)
    check_head_is_not_stopped(found, ctx.flags, ctx.cloud.region, ctx.now())
    _check_existing(ctx, spec, found, record)
    workers = [machine for machine in found.alive if machine.role != HEAD]
    impaired = find_impaired(ctx, workers)
    notices = describe_spot_notices(ctx.clients.ec2, workers)
    plan_input = PlanInput(
        spec=spec,
        record=new,
        found=found,
        recipe=_recipe(ctx, spec.stack),
        public_key=public_key,
        now=ctx.now(),
        unhealthy={
            **dict.fromkeys(impaired, "impaired, according to EC2's status checks"),
            **{id_: f"EC2 is reclaiming it: {notice}" for id_, notice in notices.items()},
        },
        wants_image=wants_image,
        packages=packages,
    )
    own = plan_input.own_image
    if own and own.state == "available" and (own.packages or own.tags.get(tags.KEPT) != "yes"):
        return plan_input
    cached = describe_cached_images(ctx.clients.ec2, plan_input.software, spec.volume_gib)
    fitting = tuple(image for image in cached if image.holds(plan_input.software, packages))
    return replace(plan_input, cached=fitting)


def _count_bought(ctx: Context, record: ClusterRecord, found: Inventory) -> int | None:
    """Return how many machines the cluster has had; ``None`` if another machine may have bought some."""
    since = tags.render_time(record.created)
    events = [event for event in ctx.events.read() if event["time"] >= since]
    bought, planned = (
        {id_ for event in events if event["event"] == kind for id_ in event["resources"]}
        for kind in ("bought", "plan")
    )
    is_ours = any(
        event["event"] == "done" and event.get("action") in ("create_group", "record")
        for event in events
    )
    listed = (*found.instances, *describe_terminated(ctx.clients.ec2).get(ctx.name, ()))
    launched = {machine.id for machine in listed if machine.launch_time >= record.created}
    return len(bought) if is_ours and bought >= planned | launched else None


def _require_new_budget(
    ctx: Context,
    change: ClusterChange,
    old: ClusterRecord | None,
    new: ClusterRecord,
    bought: int | None,
) -> None:
    """Check that a cluster whose machines have ended does not get its --budget a second time unasked."""
    if (
        old
        and old.options["budget"]
        and old.created != new.created
        and "budget" not in change.given
        and bought != 0
    ):
        usd = old.options["budget"]
        raise UsageError(
            f"the machines of cluster {ctx.name!r} have ended, and their --budget of ${usd:.10g} with them",
            hint=f"for the new machines: spr-cluster up --budget {usd:.10g} {ctx.flags}",
        )


def _recipe(ctx: Context, stack: str) -> str:
    return recipe_digest(load_stack(stack), ctx.cloud.base)


def _kept_stack(ctx: Context, found: Inventory) -> str | None:
    """Return the stack of a kept image, which is the default of the next `up`."""
    installed = {image.tags.get(tags.INSTALLED) for image in found.images}
    names = stack_names() if installed else ()
    return next((name for name in names if _recipe(ctx, name) in installed), None)


def find_offers(
    ctx: Context, plan_input: PlanInput, note: Callable[[str], None] | None = None
) -> tuple[Offer, ...]:
    """Return every way to buy what is missing. ``note`` receives warnings for the user.

    Raises :class:`UsageError` if the region offers none, or if this machine could not reach the machines.
    """
    spec, group = plan_input.spec, plan_input.group
    require_way(spec.jump or "")
    ec2, note = ctx.clients.ec2, note or ctx.progress.note
    support = network.describe_type_support(ec2, spec.instance_types)
    network.require_known(ec2, spec.instance_types, support)
    networks = network.describe_networks(ec2, spec.subnet_ids, group.vpc_id if group else None)
    network.require_offers(spec, support, networks, ctx.cloud.region)
    zones = {zone for known in support.values() for zone in known.zones}
    # A proxy that no route table shows may be their way out.
    downloads = plan_input.image is None and not spec.proxy
    networks = require_ways(
        ctx.clients,
        [n for n in networks if n.zone in zones],
        note,
        spec,
        installs=downloads,
    )
    if ctx.cloud.billed:  # containers reach the embedded S3 in any network
        networks = require_s3(ctx.clients, networks, note, spec)
    flows = ssh_flows(spec.caller) if spec.caller else ()
    flows += install_flows() if downloads else ()
    networks = require_open_acls(ec2, networks, flows, note)
    require_jump(ctx.clients, spec, networks, note)
    if not spec.private and not spec.jump and (blocked := ctx.cloud.probe_ssh()):
        note(
            "This machine's network seems to block port 22, over which the machines are reached: "
            f"{blocked}."
        )
    return list_offers(spec, support, networks, find_reservations(ctx, plan_input, networks))


def find_reservations(
    ctx: Context, plan_input: PlanInput, networks: Sequence[network.Network]
) -> tuple[Reservation, ...]:
    """Return the capacity reservations to buy in: the one asked for, else open ones with enough room.

    Raises :class:`UsageError` if the one asked for can't serve.
    """
    spec, ec2 = plan_input.spec, ctx.clients.ec2
    if spec.spot:
        return ()
    if spec.capacity_reservation is None:
        healthy = [m for m in plan_input.found.alive if m.id not in plan_input.unhealthy]
        return find_open_reservations(ec2, spec.instance_types, max(1, spec.nodes - len(healthy)))
    wanted = find_reservation(ec2, spec)
    if wanted.zone not in {each.zone for each in networks}:
        raise UsageError(
            f"--capacity-reservation {wanted.id}: it is in {wanted.zone}, which has no usable subnet",
            hint=f"choose a subnet in {wanted.zone} with --subnet-id",
        )
    return (wanted,)


def _find_cidrs(
    ctx: Context, group: SecurityGroup | None, asked: str | None
) -> tuple[tuple[str, ...], str]:
    """Return the ranges that may use SSH, and the one that is this machine's looked-up address."""
    words = parse_ssh_cidr(asked) if asked else ()
    if words and AUTO not in words:
        return words, ""
    caller = ctx.cloud.caller_cidr()
    # An address that the user chose does not follow this machine.
    if words:
        cidrs = tuple(dict.fromkeys(caller if word == AUTO else word for word in words))
        return cidrs, "" if caller in words else caller
    if group is None:
        return (caller,), caller
    is_chosen = caller in group.ssh_cidrs and caller not in group.followed
    return group.cidrs_for(caller), "" if is_chosen else caller


def _find_private_cidrs(
    ctx: Context, group: SecurityGroup | None, asked: str | None, subnet_ids: Sequence[str]
) -> tuple[str, ...]:
    """Return the ranges that may use SSH from inside or over --jump: by default the VPC's own.

    The internet's view of this machine's address does not count there.
    """
    words = parse_ssh_cidr(asked) if asked else ()
    if words and AUTO not in words:
        return words
    kept = tuple(c for c in group.ssh_cidrs if c not in group.followed) if group else ()
    if not words and kept:
        return kept
    ec2 = ctx.clients.ec2
    networks = [] if group else network.describe_networks(ec2, subnet_ids, None)
    vpc_id = group.vpc_id if group else networks[0].vpc_id if networks else ""
    inside = describe_vpc_cidrs(ec2, vpc_id) if vpc_id else ()
    if not inside:
        raise UsageError(
            "--private or --jump: the address ranges of the VPC are not known",
            hint="choose a subnet with --subnet-id, and the addresses that may use SSH with --ssh-cidr",
        )
    return (*(word for word in words if word != AUTO), *inside)


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
        raise time_is_over(ctx, record, found.alive)


def time_is_over(ctx: Context, record: ClusterRecord, machines: Sequence[Instance]) -> SprError:
    """Return the error for a cluster whose nodes wait for `fetch`, are shutting down, or did not."""
    over = f"the time to live of cluster {ctx.name!r} is over; its nodes"
    if stuck := describe_stuck(record, machines, ctx.now(), billed=ctx.cloud.billed):
        return SprError(
            f"the time to live of cluster {ctx.name!r} is over; {stuck}",
            hint=f"to remove what is left: spr-cluster down {ctx.flags}",
        )
    if not record.is_ended(ctx.now()):
        until = record.spoken_grace(ctx.now())
        return SprError(
            f"{over} wait for `fetch` {until} if anything is only on them, and start nothing new",
            hint=f"to go on with them: spr-cluster extend 2h {ctx.flags}; results: spr-cluster fetch "
            f"JOB {ctx.flags}",
        )
    return SprError(
        f"{over} are shutting down",
        hint=f"in two minutes, `spr-cluster up {ctx.flags}` creates a new one; "
        f"to remove the rest: spr-cluster down {ctx.flags}",
    )
