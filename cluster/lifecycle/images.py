"""This tool's images in an account: which ones `up` can use, and which are useless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from infra.aws.cloud import Cloud
from infra.ec2 import tags
from infra.ec2.images import Image
from infra.ec2.inventory import Inventory, describe_inventories
from infra.errors import UsageError
from infra.plan.planner import plan_down
from infra.plan.removal import remove
from infra.wait import Progress
from provision.bake import recipe_digest
from provision.stacks.load import load_stack, stack_names

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

_KINDS = ("instances", "images")


@dataclass(frozen=True)
class OurImage:
    """An image and the stack whose current recipe it holds (empty if none does)."""

    image: Image
    cluster: str
    stack: str
    in_use: bool
    """Whether its cluster has machines, whose replacements may start from it."""

    @property
    def kept(self) -> bool:
        return self.image.tags.get(tags.KEPT) == "yes"

    @property
    def owner(self) -> str:
        """The ARN of its creator; "" if unknown."""
        return self.image.tags.get(tags.OWNER, "")

    @property
    def state(self) -> str:
        """``ready``, ``being made``, ``failed``, ``unfinished``, or ``outdated``."""
        if self.image.state not in ("pending", "available"):
            return "failed"
        if self.image.tags.get(tags.SEALED) != "yes":
            return "unfinished"
        if not self.stack:
            return "outdated"
        return "ready" if self.image.state == "available" else "being made"

    @property
    def is_useless(self) -> bool:
        """Whether no `up` will ever start from it."""
        return self.state in ("failed", "unfinished", "outdated") and not self.in_use

    def as_dict(self, now: datetime) -> dict[str, Any]:
        """Return the image for ``--json``; the age is in seconds."""
        return {
            "image": self.image.id,
            "stack": self.stack or self.image.tags.get(tags.STACK, ""),
            "recipe": self.image.tags.get(tags.INSTALLED, ""),
            "packages": self.image.packages,
            "state": self.state,
            "kept": self.kept,
            "cluster": self.cluster,
            "owner": self.owner or None,
            "cluster_has_machines": self.in_use,
            "age_s": self.image.age_s(now),
            "disk_gib": self.image.volume_gib,
            "snapshots": list(self.image.snapshot_ids),
        }


def describe_our_images(cloud: Cloud, ec2: EC2Client) -> tuple[OurImage, ...]:
    """Return every image that carries our tag in the client's region, oldest first."""
    recipes = {recipe_digest(load_stack(name), cloud.base): name for name in stack_names()}
    found = describe_inventories(ec2, _KINDS)
    ours = [
        OurImage(image, name, recipes.get(image.tags.get(tags.INSTALLED, ""), ""), bool(it.alive))
        for name, it in found.items()
        for image in it.images
    ]
    return tuple(sorted(ours, key=lambda our: (our.image.created, our.image.id)))


def choose_images(images: Sequence[OurImage], ids: Iterable[str]) -> tuple[OurImage, ...]:
    """Return the images with these IDs. Raises :class:`UsageError` for one that is not ours, or in use."""
    known = {our.image.id: our for our in images}
    wanted = dict.fromkeys(ids)
    if foreign := [id_ for id_ in wanted if id_ not in known]:
        what = f"no image {foreign[0]!r} made by this tool"
        raise UsageError(what, hint="spr-cluster images shows them")
    chosen = tuple(known[id_] for id_ in wanted)
    for our in chosen:
        if our.in_use:
            raise UsageError(
                f"image {our.image.id} is in use: cluster {our.cluster!r} has machines"
            )
    return chosen


def delete_images(ec2: EC2Client, images: Sequence[OurImage], progress: Progress) -> None:
    """Deregister images and delete their snapshots, which are what costs money."""
    for action in plan_down(Inventory(images=tuple(our.image for our in images))).actions:
        with progress.phase(action.title):
            remove(ec2, action)
