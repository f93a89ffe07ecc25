"""``down``: everything that carries the cluster's tag goes, and EC2 is asked what is left."""

from __future__ import annotations

from dataclasses import dataclass

from botocore.exceptions import ClientError

from cluster.context import Context
from cluster.local_files import remembered_cloud
from infra import instances, tags
from infra.actions import ActionKind, Plan
from infra.clients import DENIED, error_code
from infra.errors import DeadlineError, SprError
from infra.images import Image, wait_until_available
from infra.inventory import Inventory, describe_inventory
from infra.plan import plan_down
from infra.removal import remove
from infra.wait import CONSISTENCY_DEADLINE_S, SETTLE_S, TERMINATE_DEADLINE_S

# What is held by something else is tried again after a look; no use in standing in front of it.
_HELD_S = 20.0
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Removed:
    """The ids of what ``down`` took away, by kind, and what it kept on purpose."""

    ids: dict[str, list[str]]
    kept: Inventory


def down(ctx: Context, name: str, *, keep_image: bool = False) -> Removed:
    """Remove a cluster and prove it.

    It looks again after each round: what an interrupted command has made may show up late.
    Raises :class:`SprError` naming whatever EC2 still shows in the end.
    """
    removed: dict[str, set[str]] = {}
    kept = Inventory()
    denied: set[str] = set()
    # Without a trace of it anywhere, one look is proof enough.
    clean, wanted = 0, 2 if ctx.files.exist else 1
    start, rounds, reason = ctx.clock.monotonic(), 0, ""
    while clean < wanted:
        found = _look(ctx, name, again=clean > 0)
        kept = _keep(ctx, found) if keep_image else Inventory()
        rest = found.without(kept)
        if not rest:
            clean += 1
            continue
        if ctx.clock.monotonic() - start > TERMINATE_DEADLINE_S + CONSISTENCY_DEADLINE_S:
            raise SprError(
                f"still there after `down`: {rest}" + (f"\n  {reason}" if reason else ""),
                hint=f"run `spr-cluster down {ctx.flags}` again; these may still cost money",
            )
        # What EC2 still shows though it is gone disappears by itself, in a while.
        ctx.clock.sleep(min(max(0, rounds - 1), _LONGEST_PAUSE_S))
        clean, wanted, rounds = 0, 2, rounds + 1
        for kind, ids in rest.ids().items():
            removed.setdefault(kind, set()).update(ids)
        reason = _remove_all(ctx, plan_down(rest), denied)
    if remembered_cloud(name) in (None, (ctx.cloud.name, ctx.cloud.region)):
        ctx.files.remove(keep_cloud=bool(kept))
    if removed:
        gone = sorted(id_ for ids in removed.values() for id_ in ids)
        ctx.events.record(
            "removed",
            f"cluster {name}; kept: {kept}" if kept else f"cluster {name}",
            resources=gone,
        )
    return Removed({kind: sorted(ids) for kind, ids in removed.items()}, kept)


def _keep(ctx: Context, found: Inventory) -> Inventory:
    """The images that others may start from, with their snapshots; labelled before anything goes.

    One that is on its way is finished while its machine, the head, is there; the workers go first.
    """
    good = [image for image in found.images if image.is_for_others]
    if new := [image.id for image in good if image.tags.get(tags.KEPT) != "yes"]:
        instances.label_instances(ctx.clients.ec2, new, {tags.KEPT: "yes"})
    if any(image.state == "pending" for image in good):
        workers = tuple(i for i in found.instances if i.role != instances.HEAD)
        _remove_all(ctx, plan_down(Inventory(instances=workers)), set())
    kept = [image for image in good if image.state != "pending" or _is_finished(ctx, image)]
    others = {id_ for image in found.images if image not in kept for id_ in image.snapshot_ids}
    # A snapshot that no other image names may be of one that EC2 has not listed it for yet.
    snapshots = [s for s in found.snapshots if kept and s.id not in others]
    return Inventory(images=tuple(kept), snapshots=tuple(snapshots))


def _is_finished(ctx: Context, image: Image) -> bool:
    """Wait for an image; where it comes to nothing that is told, and it goes with the rest."""
    with ctx.progress.phase(f"Image on its way: {image.id}"):
        try:
            wait_until_available(ctx.clients.ec2, image.id, ctx.progress, ctx.clock)
        except SprError as error:
            ctx.progress.note(f"{error.message}; it goes with the rest")
            return False
    return True


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


def _remove_all(ctx: Context, plan: Plan, denied: set[str]) -> str:
    """One round of removals; returns why one of them has to wait for what shows up next.

    ``denied`` are the ids that were denied in an earlier round; a second time that is an error.
    """
    reason = ""
    for action in plan.actions:
        limit = TERMINATE_DEADLINE_S if action.kind is ActionKind.TERMINATE else _HELD_S

        def note(passed: float, limit: float = limit) -> None:
            ctx.progress.note(f"ending, {passed / 60:.0f} min of at most {limit / 60:.0f}")

        with ctx.perform(action):
            try:
                remove(ctx.clients.ec2, action, ctx.clock, deadline_s=limit, on_wait=note)
            except DeadlineError as error:
                # The rest goes on: a machine that is stuck must not keep image and snapshots.
                reason = error.message
            except ClientError as error:
                if error_code(error) not in DENIED or set(action.ids) <= denied:
                    raise
                # A policy that asks for our tag may deny what is gone, tags and all: look again.
                denied.update(action.ids)
    return reason
