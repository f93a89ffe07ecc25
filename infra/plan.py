"""From what is there to what is wished for: the actions of ``up`` and ``down``. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from infra import tags
from infra.actions import Action, ActionKind, Plan
from infra.errors import SprError
from infra.images import Image
from infra.instance_types import INSTANCE_TYPES
from infra.instances import HEAD, Instance
from infra.inventory import Inventory
from infra.record import Record, record_tags
from infra.spec import ClusterSpec
from infra.words import counted


@dataclass(frozen=True)
class PlanInput:
    """Everything that ``up`` decides by: the wish, and what is there.

    ``recipe`` is the digest of the wished software, ``public_key`` the key that this machine holds
    for the cluster (type and base64, or empty), ``unhealthy`` the reasons by instance id, ``cached``
    kept images of other clusters with the same software.
    """

    spec: ClusterSpec
    record: Record
    found: Inventory
    recipe: str
    public_key: str
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    cached: tuple[Image, ...] = ()
    wants_image: bool = False
    """An image is what it is all about, even without workers to start from it."""

    @property
    def software(self) -> str:
        """The digest that counts: a cluster that exists keeps the software that it was made with."""
        nodes = rank_instances(_in_place(self))
        installed = (node.tags.get(tags.INSTALLED) for node in nodes)
        return next((digest for digest in installed if digest), self.recipe)

    @property
    def own_image(self) -> Image | None:
        """The cluster's own image, from which nodes can be made now or soon."""
        fitting = [image for image in self.found.images if image.holds(self.software)]
        return min(fitting, key=lambda image: (image.state != "available", image.id), default=None)

    @property
    def bake(self) -> str:
        """``head`` or ``none``, as in the spec; nodes of an older recipe can only be copied."""
        return self.spec.bake if self.software == self.recipe else "head"

    @property
    def image(self) -> Image | None:
        """What missing nodes start from; ``None`` where that is the bare base image."""
        own = self.own_image
        if own is not None and own.state == "available":
            return own
        if self.cached:
            # The newest has the newest base.
            return max(self.cached, key=lambda image: (image.created, image.id))
        # Where every node can install by itself, nobody waits an hour for an image.
        return own if self.bake == "head" else None


def rank_instances(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """By role, then launch: the head first, the workers in EC2's launch order."""
    return tuple(
        sorted(instances, key=lambda i: (i.role != HEAD, i.launch_time, i.launch_index, i.id))
    )


def mesh_digest(nodes: Sequence[Instance]) -> str:
    """Names one set of nodes in their ranks: connected nodes carry it on their head."""
    return hashlib.sha256(" ".join(n.id for n in nodes).encode()).hexdigest()[:16]


def _in_place(given: PlanInput) -> list[Instance]:
    """The healthy machines of the place (type and zone) where most of the cluster is."""
    alive = [
        instance
        for instance in given.found.alive
        if instance.state in ("pending", "running") and instance.id not in given.unhealthy
    ]
    places = Counter(instance.place for instance in alive)
    heads = {instance.place for instance in alive if instance.role == HEAD}
    place = max(places, key=lambda p: (places[p], p in heads, p), default=None)
    return [instance for instance in alive if instance.place == place]


def _sort_machines(given: PlanInput) -> tuple[tuple[Instance, ...], dict[str, str]]:
    """Those that stay, in the order of their ranks, and why each of the others goes."""
    nodes = rank_instances(_in_place(given))
    # A second head can only be what an interrupted move has left.
    keep = tuple(n for i, n in enumerate(nodes) if i == 0 or n.role != HEAD)
    # What would be installed on a bare one today is not what the others have.
    mixed = given.software != given.recipe
    keep = tuple(n for n in keep if n.tags.get(tags.INSTALLED) or not mixed)
    keep = keep[: given.spec.nodes]
    kept = {instance.id for instance in keep}
    strays = {}
    for instance in given.found.alive:
        if instance.id in kept:
            continue
        if instance.id in given.unhealthy:
            strays[instance.id] = given.unhealthy[instance.id]
        elif instance.state in ("stopping", "stopped"):
            strays[instance.id] = instance.state
        else:
            strays[instance.id] = "not needed"
    return keep, strays


def check_head_is_not_stopped(found: Inventory, given_up: Container[str] = ()) -> None:
    """Raises :class:`SprError` for a stopped head: its disk may hold the only copy of results.

    ``given_up`` are ids of machines that never worked.
    """
    for instance in found.alive:
        stopped = instance.state in ("stopping", "stopped")
        if instance.role == HEAD and stopped and instance.id not in given_up:
            raise SprError(
                f"the head node {instance.id} is {instance.state}; it was left as it is",
                hint=f"start it: aws ec2 start-instances --instance-ids {instance.id}; "
                "or remove the cluster: spr-cluster down",
            )


def plan_up(given: PlanInput) -> Plan:
    """From what is there to what is wished for; nothing but a look where both are the same."""
    keep, strays = _sort_machines(given)
    actions = [
        *_plan_removals(given, strays),
        *_plan_surroundings(given, keep),
        *_plan_machines(given, keep),
    ]
    # Whichever of the wished types it will be: the dearest one is the most that it can cost.
    machines = [INSTANCE_TYPES[keep[0].instance_type]] if keep else given.spec.machines
    usd_per_hour = max(m.usd_per_hour for m in machines) * given.spec.nodes
    return Plan(tuple(actions), usd_per_hour, keep)


def expected_by_bake(given: PlanInput) -> dict[str, tuple[int, int]]:
    """Minutes, at least and at most, that each way to the software takes on AWS, by its name."""
    ways = ("none", "head")
    wishes = {way: given.spec.model_copy(update={"bake": way}) for way in ways}
    return {way: plan_up(replace(given, spec=wish)).expected_min for way, wish in wishes.items()}


def _plan_removals(given: PlanInput, strays: Mapping[str, str]) -> list[Action]:
    kind, found = ActionKind, given.found
    actions = []
    if strays:
        detail = ", ".join(f"{id_} ({why})" for id_, why in strays.items())
        actions.append(Action(kind.TERMINATE, detail, tuple(strays)))
    # What was kept on purpose is for its owner to remove; failed, it would only hold on to the name
    # that the next image of this head has to have.
    useless = [
        image
        for image in found.images
        if image != given.own_image and not (image.is_sound and image.tags.get(tags.KEPT) == "yes")
    ]
    # A machine of it may still be starting; it goes with the cluster, or at the next `up`.
    if useless:
        ids = tuple(image.id for image in useless)
        actions.append(Action(kind.DELETE_IMAGES, f"{', '.join(ids)} (not usable)", ids))
        if snapshots := tuple(s for image in useless for s in image.snapshot_ids):
            actions.append(Action(kind.DELETE_SNAPSHOTS, ", ".join(snapshots), snapshots))
    foreign = [key.id for key in found.key_pairs if key.public != given.public_key]
    if foreign:
        actions.append(Action(kind.DELETE_KEYS, "its private half is not here", tuple(foreign)))
    return actions


def _plan_surroundings(given: PlanInput, keep: Sequence[Instance]) -> list[Action]:
    kind, spec, found = ActionKind, given.spec, given.found
    actions, group = [], found.group
    wanted = record_tags(spec, given.record)
    if group is None:
        actions.append(Action(kind.CREATE_GROUP, f"of cluster {spec.name}"))
    elif wanted.items() - group.tags.items():
        actions.append(Action(kind.RECORD, counted(spec.nodes, "node"), (group.id,)))
    if group is None or not group.is_open_as(spec.ssh_cidr):
        detail = f"SSH from {spec.ssh_cidr}, everything between the nodes"
        actions.append(Action(kind.OPEN_GROUP, detail))
    if given.public_key not in {key.public for key in found.key_pairs if key.public}:
        actions.append(Action(kind.IMPORT_KEY, "ed25519, made for this cluster"))
    wants_group = spec.placement_group and spec.nodes > len(keep) and spec.nodes > 1
    if wants_group and not found.placement_groups:
        actions.append(Action(kind.CREATE_PLACEMENT, "machines close to one another"))
    return actions


def _plan_machines(given: PlanInput, keep: Sequence[Instance]) -> list[Action]:
    kind, spec = ActionKind, given.spec
    missing = spec.nodes - len(keep)
    has_head = bool(keep) and keep[0].role == HEAD
    in_order = not missing and has_head and is_connected(keep)
    actions = []
    if keep and not in_order:
        listed = ", ".join(instance.id for instance in keep[:4]) + (" …" if len(keep) > 4 else "")
        actions.append(Action(kind.REACH, listed))
    if keep and not has_head:
        actions.append(Action(kind.PROMOTE, keep[0].id, (keep[0].id,)))
    actions += _plan_software(given, keep, missing)
    if not in_order:
        actions.append(Action(kind.CONNECT, "node-to-node SSH, names, hostfile"))
    amx = ", AMX on every node" if spec.amx_required else ""
    actions.append(Action(kind.VERIFY, f"every node reachable from the head{amx}"))
    if given.bake == "none" and not given.own_image and not given.cached:
        detail = "an AMI of the head, for repair, for growth, and for the next time"
        actions.append(Action(kind.BEGIN_IMAGE, detail))
    return actions


def _plan_software(given: PlanInput, keep: Sequence[Instance], missing: int) -> list[Action]:
    """The missing nodes and the software of all: from an image, or installed."""
    kind, spec, image = ActionKind, given.spec, given.image
    machines = [INSTANCE_TYPES[keep[0].instance_type]] if keep else spec.machines
    machine = " or ".join(each.name for each in machines)
    what = f"{machine}, {spec.volume_gib} GiB encrypted gp3"

    def run(kind: ActionKind, detail: str) -> Action:
        return Action(kind, detail, virtual=not any(each.is_metal for each in machines))

    if image is not None:
        actions = _plan_install(spec, keep, 0)
        if image.state == "pending" and (missing or given.wants_image):
            actions.append(Action(kind.WAIT_IMAGE, image.id, (image.id,)))
        if not keep:
            all_nodes = f"{spec.nodes} x {what}, from image {image.id}"
            actions.append(run(kind.RUN_NODES, all_nodes))
        elif missing:
            new_nodes = f"{missing} x {machine}, from image {image.id}"
            actions.append(run(kind.RUN_WORKERS, new_nodes))
        return actions
    if given.bake == "none":
        first = kind.RUN_WORKERS if keep else kind.RUN_NODES
        bought = [run(first, f"{missing} x {what}, from Ubuntu's own image")]
        return [*(bought if missing else ()), *_plan_install(spec, keep, missing)]
    actions = [] if keep else [run(kind.RUN_HEAD, f"1 x {what}")]
    actions += _plan_install(spec, keep, 0 if keep else 1)
    workers = missing if keep else spec.workers
    if workers or given.wants_image:
        purpose = "for the workers" if workers else "to be kept"
        actions.append(Action(kind.CREATE_IMAGE, f"an AMI of the head, {purpose}"))
    if workers:
        actions.append(run(kind.RUN_WORKERS, f"{workers} x {machine}, from that image"))
    return actions


def _plan_install(spec: ClusterSpec, keep: Sequence[Instance], new: int) -> list[Action]:
    bare = [not instance.tags.get(tags.INSTALLED) for instance in keep] + [True] * new
    if not any(bare):
        return []
    where = f"{sum(bare)} nodes at once"
    if sum(bare) == 1:
        where = "the head" if bare[0] else "1 node"
    return [Action(ActionKind.INSTALL, f"stack {spec.stack} on {where}")]


def is_connected(keep: Sequence[Instance]) -> bool:
    """Whether these nodes, in the order of their ranks, know one another."""
    return bool(keep) and keep[0].tags.get(tags.MESH) == mesh_digest(keep)


_REMOVALS = (
    (ActionKind.TERMINATE, "instances"),
    (ActionKind.CANCEL_SPOT, "spot_requests"),
    (ActionKind.DELETE_IMAGES, "images"),
    (ActionKind.DELETE_SNAPSHOTS, "snapshots"),
    (ActionKind.DELETE_VOLUMES, "volumes"),
    (ActionKind.DELETE_INTERFACES, "interfaces"),
    (ActionKind.RELEASE_ADDRESSES, "addresses"),
    (ActionKind.DELETE_TEMPLATES, "launch_templates"),
    (ActionKind.DELETE_PLACEMENTS, "placement_groups"),
    (ActionKind.DELETE_GROUPS, "security_groups"),
    (ActionKind.DELETE_KEYS, "key_pairs"),
)


# EC2 itself takes away a machine's disk and interface with it, and only then lets go of its groups:
# what is left of these is found by the next look.
_AFTER_MACHINES = (
    "volumes",
    "interfaces",
    "addresses",
    "placement_groups",
    "security_groups",
)


def plan_down(found: Inventory) -> Plan:
    """Take away what was found, machines first: what they hold is for the next look."""
    ids = found.ids()
    if found.instances:
        ids = {kind: listed for kind, listed in ids.items() if kind not in _AFTER_MACHINES}
    image_snapshots = [s for image in found.images for s in image.snapshot_ids]
    if image_snapshots:
        ids["snapshots"] = sorted({*ids.get("snapshots", []), *image_snapshots})
    return Plan(
        tuple(
            Action(kind, ", ".join(ids[name]), tuple(ids[name]))
            for kind, name in _REMOVALS
            if name in ids
        )
    )
