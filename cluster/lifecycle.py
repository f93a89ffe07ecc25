"""The life of a cluster: observe, plan, apply, until what is there is what was wished for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from cluster.context import Context, missing_key
from cluster.files import remembered_cloud
from cluster.machines import PlanAgainError
from cluster.nodes import Cluster, find_cluster
from cluster.up import Up
from infra import access, instances, network, tags
from infra.buying import Offer, list_offers
from infra.errors import DeadlineError, SprError, UsageError
from infra.instances import HEAD, describe_impaired
from infra.inventory import PLANNED_KINDS, Inventory, describe_inventory
from infra.plan import (
    ActionKind,
    Plan,
    Situation,
    check_head_is_not_stopped,
    plan_down,
    plan_up,
)
from infra.record import Record, merge_wishes, new_record, record_tags
from infra.removal import remove
from infra.spec import LONGEST_TTL, ClusterSpec
from infra.wait import CONSISTENCY_DEADLINE_S, TERMINATE_DEADLINE_S
from provision.host import on_all
from provision.install import stack_digest
from provision.lifetime import extend_life
from provision.stacks import Stack, load_stack

# A machine that does not work is replaced; when that happens again and again, something else is wrong.
_MOST_REPLACEMENTS = 2
_MOST_ROUNDS = 12
_LONGEST_PAUSE_S = 15.0
# EC2 may show what was made by an interrupted command only seconds later: so it is asked twice.
SETTLE_S = 5.0
_HELD_S = 20.0


@dataclass(frozen=True)
class Removed:
    """The ids of what ``down`` took away, by kind, and what it kept on purpose."""

    ids: dict[str, list[str]]
    kept: Inventory


def observe(ctx: Context, cluster: str) -> Inventory:
    """What ``up`` decides by, from the tags."""
    return describe_inventory(ctx.clients.ec2, cluster, PLANNED_KINDS)


def prepare(ctx: Context, cluster: str, given: Mapping[str, Any], ssh_cidr: str) -> Situation:
    """The wish and what is there, side by side; nothing is changed.

    Raises :class:`UsageError` for a wish that an existing cluster can't follow, or where this
    machine is not the one that can enter it.
    """
    found = observe(ctx, cluster)
    record = found.record
    _check_other_clouds(ctx, cluster)
    defaults = {"stack": ctx.cloud.default_stack, "amx_required": ctx.cloud.has_amx}
    spec = merge_wishes(cluster, _ssh_cidr(found, ssh_cidr), given, record, defaults)
    check_head_is_not_stopped(found)
    _check_existing(ctx, spec, found, record)
    unhealthy = {}
    if workers := [i.id for i in found.alive if i.role != HEAD]:
        impaired = describe_impaired(ctx.clients.ec2, workers)
        unhealthy = dict.fromkeys(impaired, "EC2's status checks call it impaired")
    return Situation(
        spec=spec,
        record=new_record(spec, ctx.now(), record),
        found=found,
        recipe=stack_digest(load_stack(spec.stack)),
        public_key=access.read_public(ctx.files.key),
        unhealthy=unhealthy,
    )


def find_offers(ctx: Context, situation: Situation) -> tuple[Offer, ...]:
    """Every way to buy what the situation lacks, before anything is made.

    Raises :class:`UsageError` where the region has none.
    """
    spec, group = situation.spec, situation.found.group
    ec2 = ctx.clients.ec2
    support = network.describe_type_support(ec2, spec.instance_types)
    networks = network.describe_networks(ec2, spec.subnet_id, group.vpc_id if group else None)
    network.require_offers(spec, support, networks, ctx.cloud.region)
    return list_offers(spec, support, networks)


def _ssh_cidr(found: Inventory, wished: str) -> str:
    """A wider range than the caller's own address stays as it is, if it has the caller in it."""
    return found.group.cidr_for(wished) if found.group else wished


def _check_other_clouds(ctx: Context, cluster: str) -> None:
    elsewhere = remembered_cloud(cluster)
    if elsewhere and elsewhere != (ctx.cloud.name, ctx.cloud.region) and ctx.files.key.exists():
        raise UsageError(
            f"this machine holds the key of a cluster {cluster!r} in {' '.join(elsewhere)}",
            hint=f"choose another --name, or remove that one first: spr-cluster down --name {cluster} "
            f"--cloud {elsewhere[0]} --region {elsewhere[1]}",
        )


def _check_existing(
    ctx: Context, spec: ClusterSpec, found: Inventory, record: Record | None
) -> None:
    if not found.alive:
        return
    key = access.read_public(ctx.files.key)
    if not key or any(pair.public not in ("", key) for pair in found.key_pairs):
        raise missing_key(ctx.files)
    types = {instance.instance_type for instance in found.alive}
    if foreign := types - set(spec.instance_types):
        raise UsageError(
            f"--instance-type {','.join(spec.instance_types)}: the machines of cluster "
            f"{spec.name!r} are {', '.join(sorted(foreign))}",
            hint=f"leave --instance-type out, or begin anew: spr-cluster down {ctx.flags}",
        )
    if record and record.is_over(ctx.now()):
        raise SprError(
            f"the time to live of cluster {spec.name!r} is over; its machines are ending themselves",
            hint=f"run the same in two minutes, or remove the rest: spr-cluster down {ctx.flags}",
        )


def bring_up(
    ctx: Context,
    situation: Situation,
    plan: Plan,
    offers: Callable[[], Sequence[Offer]],
    on_new_plan: Callable[[Plan, str], None] = lambda _plan, _reason: None,
) -> Cluster:
    """Apply a plan; where the ground moves under it, observe and plan again, a bounded time.

    Raises :class:`SprError` naming the machines that do not work even after their replacement.
    """
    stack: Stack = load_stack(situation.spec.stack)
    replacements = 0
    reason = ""
    for number in range(_MOST_ROUNDS):
        try:
            return Up(ctx, situation, stack, plan, offers).apply()
        except PlanAgainError as again:
            reason = str(again)
            replacements += bool(again.unhealthy)
            if replacements > _MOST_REPLACEMENTS:
                break
            unhealthy = {**situation.unhealthy, **again.unhealthy}
            if not again.unhealthy:
                # EC2 needs some seconds to show everywhere what was made or deleted just now.
                ctx.clock.sleep(min(2.0**number, _LONGEST_PAUSE_S))
        found = observe(ctx, situation.spec.name)
        situation = replace(
            situation,
            found=found,
            unhealthy=unhealthy,
            public_key=access.read_public(ctx.files.key),
        )
        plan = plan_up(situation)
        on_new_plan(plan, reason)
    raise SprError(
        f"the cluster did not come up: {reason}",
        hint="another --instance-type or --region; `spr-cluster ssh` into a node may show more",
    )


def extend(ctx: Context, cluster: str, more: timedelta) -> Record:
    """Let a cluster live longer: on its nodes, then in its tags. It can run again when interrupted."""
    nodes = find_cluster(ctx.clients.ec2, cluster).nodes
    found = describe_inventory(ctx.clients.ec2, cluster, ("security_groups",))
    if found.group is None or found.record is None:
        raise SprError(f"cluster {cluster!r} has no record", hint=f"spr-cluster up {ctx.flags}")
    record = replace(found.record, expires=found.record.expires + more)
    if record.expires - ctx.now() > LONGEST_TTL:
        raise UsageError("a cluster lives at most 30 days from now on")
    open_host = ctx.host_opener()
    hosts = [open_host(node) for node in nodes]
    with ctx.progress.phase(f"Extend {len(nodes)} nodes to {tags.render_time(record.expires)}"):
        on_all("extending", hosts, lambda host: extend_life(host, record.expires))
        spec = merge_wishes(cluster, "0.0.0.0/32", {}, record)
        label = {tags.EXPIRES: record_tags(spec, record)[tags.EXPIRES]}
        ids = [found.group.id, *(node.instance.id for node in nodes)]
        instances.label_instances(ctx.clients.ec2, ids, label)
    return record


def down(ctx: Context, name: str, *, keep_image: bool = False) -> Removed:
    """Remove a cluster and prove it.

    It looks again after each round: what an interrupted command has made may show up late.
    Raises :class:`SprError` naming whatever EC2 still shows in the end.
    """
    removed: dict[str, set[str]] = {}
    # Without a trace of it anywhere, one look is proof enough.
    clean, wanted = 0, 2 if ctx.files.folder.exists() else 1
    start, rounds, reason = ctx.clock.monotonic(), 0, ""
    while clean < wanted:
        found = _look(ctx, name, again=clean > 0)
        rest = found.without_image() if keep_image else found
        if not rest:
            clean += 1
            continue
        if ctx.clock.monotonic() - start > TERMINATE_DEADLINE_S + CONSISTENCY_DEADLINE_S:
            raise SprError(
                f"still there after `down`: {rest}" + (f"\n  {reason}" if reason else ""),
                hint=f"run `spr-cluster down {ctx.flags}` again; these may still cost money",
            )
        # What EC2 still shows though it is gone disappears by itself, in a while.
        ctx.clock.sleep(min(max(0, rounds - 1), SETTLE_S))
        clean, wanted, rounds = 0, 2, rounds + 1
        for kind, ids in rest.ids().items():
            removed.setdefault(kind, set()).update(ids)
        reason = _remove_all(ctx, plan_down(rest))
    kept = found if keep_image else Inventory()
    if kept.images:
        ids = [image.id for image in kept.images]
        instances.label_instances(ctx.clients.ec2, ids, {tags.KEPT: "yes"})
    if remembered_cloud(name) in (None, (ctx.cloud.name, ctx.cloud.region)):
        ctx.files.remove(keep_cloud=bool(kept))
    return Removed({kind: sorted(ids) for kind, ids in removed.items()}, kept)


def _look(ctx: Context, name: str, *, again: bool) -> Inventory:
    title = (
        f"Proof: a second look after {SETTLE_S:.0f} s" if again else "Look for the cluster's tag"
    )
    with ctx.progress.phase(title):
        if again:
            ctx.clock.sleep(SETTLE_S)
        found = describe_inventory(ctx.clients.ec2, name)
        ctx.progress.note(found.counts() or "nothing")
    return found


def _remove_all(ctx: Context, plan: Plan) -> str:
    """One round of removals; returns why one of them has to wait for what shows up next."""
    reason = ""
    for action in plan.actions:
        limit = TERMINATE_DEADLINE_S if action.kind is ActionKind.TERMINATE else _HELD_S

        def note(passed: float, limit: float = limit) -> None:
            ctx.progress.note(f"ending, {passed / 60:.0f} min of at most {limit / 60:.0f}")

        with ctx.progress.phase(action.title):
            try:
                remove(ctx.clients.ec2, action, ctx.clock, deadline_s=limit, on_wait=note)
            except DeadlineError as error:
                if action.kind is ActionKind.TERMINATE:
                    raise
                reason = error.message
    return reason
