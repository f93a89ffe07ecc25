"""Removes a cluster: deletes everything with its tag, then verifies that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from botocore.exceptions import ClientError

from cluster.context import Context
from cluster.local_files import remembered_account, remembered_cloud
from infra.aws.clients import DENIED, error_code, patient
from infra.ec2 import instances, tags
from infra.ec2.images import Image, wait_until_available
from infra.ec2.inventory import Inventory, Resource, describe_inventory
from infra.ec2.key_pair import read_public
from infra.ec2.termination_schedule import ClusterGuard, is_guarded, with_guard
from infra.errors import DeadlineError, SprError
from infra.files import read_text, write_private
from infra.iam.instance_profile import ClusterProfile, has_profile, with_profile
from infra.plan.actions import ActionKind, Plan
from infra.plan.ownership import Generation
from infra.plan.planner import plan_down
from infra.plan.removal import remove
from infra.wait import (
    CONSISTENCY_DEADLINE_S,
    DOWN_DEADLINE_S,
    HELD_DEADLINE_S,
    IMAGE_DEADLINE_S,
    TERMINATE_DEADLINE_S,
    wait_until,
)

_LONGEST_PAUSE_S = 5.0
# AWS deletes these by name, and a newer cluster's have the same names.
_BY_NAME = {ActionKind.DELETE_PLACEMENTS, ActionKind.DELETE_GUARDS, ActionKind.DELETE_PROFILES}


@dataclass(frozen=True)
class Removed:
    """IDs of the resources that ``down`` removed, by kind, and what it kept on purpose."""

    ids: dict[str, list[str]]
    kept: Inventory


def down(
    ctx: Context,
    *,
    keep_image: bool = False,
    is_new_kept: bool = True,
    approve: Callable[[Inventory], object] = lambda _: None,
    approved: Inventory | None = None,
) -> Removed:
    """Remove a cluster and verify that it is gone. ``approve`` gets what exists before anything changes.

    ``approved`` is what the user approved earlier, if anything existed. ``keep_image`` keeps images; without
    ``is_new_kept``, only those that the user keeps already. EC2 is searched again after each
    round, because an interrupted command's resources may be listed late. Raises :class:`SprError` naming
    what is left at the end, or what another command created or changed after the approval.
    """
    removed: dict[str, set[str]] = {}
    kept = Inventory()
    denied: set[str] = set()
    # If this machine has no files of the cluster, one search is enough.
    begun, clean, wanted = False, 0, 2 if ctx.files.exist else 1
    start = without_machines = ctx.clock.monotonic()
    rounds, reason = 0, ""
    was_guarded = had_profile = had_record = False
    generation = Generation.of(approved, read_public(ctx.files.key)) if approved else None
    while clean < wanted:
        found = _search(ctx, again=clean > 0)
        was_guarded |= is_guarded(found)
        had_record |= bool(found.security_groups)
        # Removing the machines, which cost money, must not depend on access to the scheduler.
        if not found.instances and (was_guarded or not had_record):
            found = with_guard(ctx.clients, ctx.name, found, is_certain=was_guarded)
        had_profile |= has_profile(found)
        if not found.instances and (had_profile or not had_record):
            found = with_profile(ctx.clients, ctx.name, found, is_certain=had_profile)
        if found and generation is None:
            approve(found)
            generation = Generation.of(found, read_public(ctx.files.key))
        if generation is not None:
            _require_approved(ctx, generation, found)
            generation = generation.joined_by(found)
        if found and not begun:
            _begin_removal(ctx)
            begun = True
        kept = _keep(ctx, found, is_new_kept=is_new_kept) if keep_image else Inventory()
        rest = found.without(kept)
        if not rest:
            clean += 1
            continue
        now = ctx.clock.monotonic()
        since, limit = without_machines, TERMINATE_DEADLINE_S + CONSISTENCY_DEADLINE_S
        if rest.instances:
            since, limit = start, DOWN_DEADLINE_S
        if now - since > limit:
            raise _still_there(ctx, rest, reason)
        # Deleted resources that EC2 still lists disappear after a while.
        ctx.clock.sleep(min(max(0, rounds - 1), _LONGEST_PAUSE_S))
        clean, wanted, rounds = 0, 2, rounds + 1
        for kind, ids in rest.ids().items():
            removed.setdefault(kind, set()).update(ids)
        reason = _remove_all(ctx, plan_down(rest), denied, start, generation)
        if rest.instances or _wait_for_snapshots(ctx, rest.snapshots):
            without_machines = ctx.clock.monotonic()
    if _is_removed(ctx):
        with suppress(OSError):
            ctx.files.remove(keep_cloud=bool(kept))
    if removed:
        gone = sorted(id_ for ids in removed.values() for id_ in ids)
        ctx.events.record(
            "removed",
            f"cluster {ctx.name}" + (f"; kept: {kept}" if kept else ""),
            resources=gone,
        )
    return Removed({kind: sorted(ids) for kind, ids in removed.items()}, kept)


def _require_approved(ctx: Context, generation: Generation, found: Inventory) -> None:
    """Raise :class:`SprError` if another command created or changed something after the approval."""
    if newer := generation.find_newer(found):
        whose = f" of {found.owner}" if found.owner else ""
        raise SprError(
            f"since its removal was approved, another command{whose} has made or changed the cluster "
            f"({', '.join(newer)}); nothing more is removed. There is now: {found}",
            hint=f"to remove that as well: spr-cluster down {ctx.flags}",
        )


def _begin_removal(ctx: Context) -> None:
    """Record that the removal has begun, so that a later `down` may delete the cluster's key."""
    if ctx.files.exist and _is_ours(ctx):
        # Machines that cost money must not wait for a full or read-only disk here.
        with suppress(OSError):
            write_private(ctx.files.removal, _place(ctx))


def has_begun(ctx: Context) -> bool:
    """Return whether this machine has begun to remove a cluster of this name, place, and account."""
    return ctx.files.removal.exists() and read_text(ctx.files.removal) == _place(ctx)


def _is_removed(ctx: Context) -> bool:
    """Return whether this machine knows that it removed the cluster, or never created anything of it.

    An empty listing alone does not justify deleting the only key: the cluster may be in another account.
    """
    if not (ctx.files.exist and _is_ours(ctx)):
        return False
    if ctx.files.removal.exists():
        return has_begun(ctx)
    events = ctx.events.read()
    last = max((n for n, event in enumerate(events) if event["event"] == "removed"), default=-1)
    was_refused = any(event.get("action") == "create_group" for event in events[last + 1 :])
    return was_refused and not any(event["event"] == "created" for event in events[last + 1 :])


def _is_ours(ctx: Context) -> bool:
    """Return whether the local files belong to a cluster in this account and region."""
    is_here = remembered_cloud(ctx.name) in (None, (ctx.cloud.name, ctx.cloud.region))
    return is_here and remembered_account(ctx.name)[0] in ("", ctx.clients.caller.account)


def _place(ctx: Context) -> str:
    return f"{ctx.cloud.name} {ctx.cloud.region} {ctx.clients.caller.account}"


def _keep(ctx: Context, found: Inventory, *, is_new_kept: bool) -> Inventory:
    """Return the images to keep, with their snapshots; label them before anything is removed.

    The head, its source, runs until a pending image is complete; the workers are removed first.
    """
    images = found.images if is_new_kept else found.kept.images
    good = [image for image in images if image.is_for_others]
    if new := [image.id for image in good if image.tags.get(tags.KEPT) != "yes"]:
        instances.label_instances(ctx.clients.ec2, new, {tags.KEPT: "yes"})
    if any(image.state == "pending" for image in good):
        workers = tuple(i for i in found.instances if i.role != instances.HEAD)
        _remove_all(ctx, plan_down(Inventory(instances=workers)), set(), ctx.clock.monotonic())
    return found.only(i for i in good if i.state != "pending" or _is_finished(ctx, i))


def _is_finished(ctx: Context, image: Image) -> bool:
    """Wait for an image; return whether it succeeded."""
    with ctx.progress.phase(f"Wait for image {image.id}"):
        try:
            wait_until_available(ctx.clients.ec2, image.id, ctx.progress, ctx.clock)
        except SprError as error:
            ctx.progress.note(f"{error.message}; it is removed with the rest")
            return False
    return True


def _still_there(ctx: Context, rest: Inventory, reason: str) -> SprError:
    return SprError(
        f"still there after `down`: {rest}" + (f"\n  {reason}" if reason else ""),
        hint=f"run `spr-cluster down {ctx.flags}` again; these resources may still cost money",
    )


def _wait_for_snapshots(ctx: Context, deleted: Sequence[Resource]) -> bool:
    """Wait for deleted snapshots that are in progress; return whether there were any.

    EC2 deletes them when they are complete. Raises :class:`SprError` after 90 minutes.
    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-deleting-snapshot.html
    """
    ids, left = {each.id for each in deleted if each.state == "pending"}, tuple(deleted)

    def probe() -> bool | None:
        nonlocal left
        found = describe_inventory(ctx.clients.ec2, ctx.name, ("snapshots",)).snapshots
        left = tuple(each for each in found if each.id in ids and each.state == "pending")
        return None if left else True

    def note(passed: float) -> None:
        minutes = f"{passed / 60:.0f} of at most {IMAGE_DEADLINE_S // 60} min"
        ctx.progress.note(f"EC2 deletes a snapshot in progress when it is complete: {minutes}")

    if not ids:
        return False
    what, limit = f"snapshot {', '.join(sorted(ids))}", IMAGE_DEADLINE_S
    with ctx.progress.phase(f"Wait for {what}"):
        try:
            wait_until(
                f"the copy of {what}",
                patient(probe),
                deadline_s=limit,
                clock=ctx.clock,
                every_s=15,
                on_wait=note,
            )
        except DeadlineError as error:
            raise _still_there(ctx, Inventory(snapshots=left), error.message) from None
    return True


def _search(ctx: Context, *, again: bool) -> Inventory:
    pause = ctx.cloud.settle_s
    title = f"Search again after {pause:.0f} s" if again else "Search for the cluster's tag"
    with ctx.progress.phase(title):
        if again:
            ctx.clock.sleep(pause)
        found = describe_inventory(ctx.clients.ec2, ctx.name)
        ctx.progress.note(found.counts() or "nothing")
    return found


def _remove_all(
    ctx: Context, plan: Plan, denied: set[str], start: float, generation: Generation | None = None
) -> str:
    """Remove what can be removed now; return why the rest must wait for the next round.

    ``denied`` are the IDs denied in an earlier round; a second denial is an error. ``start`` is when the
    removal began.
    """
    reason = ""

    def note(_: float) -> None:
        passed = (ctx.clock.monotonic() - start) / 60
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
        cost = ", no longer billed" if ctx.cloud.billed else ""
        ctx.progress.note(
            f"shutting down{cost}: {passed:.0f} min of at most {DOWN_DEADLINE_S // 60}"
        )

    for action in plan.actions:
        if generation and action.kind in _BY_NAME:
            groups = describe_inventory(ctx.clients.ec2, ctx.name, ("security_groups",))
            _require_approved(ctx, generation, groups)
        limit = TERMINATE_DEADLINE_S if action.kind is ActionKind.TERMINATE else HELD_DEADLINE_S

        with ctx.perform(action):
            try:
                if action.kind is ActionKind.DELETE_GUARDS:
                    ClusterGuard(ctx.clients, ctx.name, ctx.clock).remove()
                elif action.kind is ActionKind.DELETE_PROFILES:
                    ClusterProfile(ctx.clients, ctx.name, ctx.clock).remove()
                else:
                    remove(ctx.clients.ec2, action, ctx.clock, deadline_s=limit, on_wait=note)
            except DeadlineError as error:
                # Continue: a stuck machine must not keep its image and snapshots.
                reason = error.message
            except ClientError as error:
                if error_code(error) == "DeleteConflict":
                    # Others may attach something at any moment: try again after the rest is gone.
                    reason = str(error)
                    continue
                is_final = error_code(error) not in DENIED or set(action.ids) <= denied
                # Without permission for the guard, the group, which records it, must stay.
                if is_final or action.kind is ActionKind.DELETE_GUARDS:
                    raise
                # A policy that requires our tag denies resources whose tags are gone: search again.
                denied.update(action.ids)
    return reason
