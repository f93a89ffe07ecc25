"""The planner: turns the desired and the existing cluster into a list of actions. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from infra.cost.prices import Prices
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord, record_tags
from infra.ec2.images import Image
from infra.ec2.instances import HEAD, Instance
from infra.ec2.inventory import Inventory
from infra.ec2.key_pair import fingerprint
from infra.ec2.network import SecurityGroup
from infra.ec2.purchase import Refusal
from infra.errors import SprError
from infra.instance_types import is_metal
from infra.lifetime import AFTER
from infra.plan.actions import Action, ActionKind, Plan
from infra.plan.ownership import check_owner, split_groups
from infra.spec import ClusterSpec
from infra.wait import END_DEADLINE_S
from infra.words import counted


@dataclass(frozen=True)
class PlanInput:
    """The desired cluster and the existing one.

    ``recipe`` is the digest of the desired software, and ``public_key`` is this machine's key for the
    cluster (type and base64, or empty). ``unhealthy`` maps instance ids to reasons. ``cached`` holds
    images with the desired software that other clusters kept.
    """

    spec: ClusterSpec
    record: ClusterRecord
    found: Inventory
    recipe: str
    public_key: str
    now: datetime
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[Refusal, ...] = ()
    """The offers whose machines EC2 ended for lack of capacity."""
    cached: tuple[Image, ...] = ()
    wants_image: bool = False
    """Whether to create an image even if no workers need it."""
    packages: str = ""
    """The packages that the image must have, as :attr:`.Image.packages`; "" for any or none."""
    prices: Prices = field(default_factory=Prices)
    end_wait_s: float = END_DEADLINE_S
    """How long a purchase waits for machines that shut down and may hold what it lacks."""

    @property
    def group(self) -> SecurityGroup | None:
        """The cluster's security group."""
        return split_groups(self.found, self.public_key)[0]

    @property
    def software(self) -> str:
        """The digest to install: an existing cluster keeps its software."""
        nodes = rank_instances(_in_place(self))
        installed = (node.tags.get(tags.INSTALLED) for node in nodes)
        return next((digest for digest in installed if digest), self.recipe)

    @property
    def own_image(self) -> Image | None:
        """The cluster's own image, available or pending. A larger disk would cost more than agreed."""
        wanted, gib = (self.software, self.packages), self.spec.volume_gib
        fitting = [i for i in self.found.images if i.holds(*wanted) and i.volume_gib <= gib]
        return min(fitting, key=lambda image: (image.state != "available", image.id), default=None)

    @property
    def large_image(self) -> Image | None:
        """A kept image with the software, for larger disks than those of the new cluster."""
        wanted = (self.software, self.packages)
        kept = [i for i in self.found.images if i.tags.get(tags.KEPT) == "yes" and i.holds(*wanted)]
        # An existing cluster keeps its disk size.
        fitting = [] if self.group or self.image else kept
        return min(fitting, key=lambda image: image.volume_gib, default=None)

    @property
    def bake(self) -> str:
        """``head`` or ``none``, as in the spec. Older software can only be copied from the head."""
        return self.spec.bake if self.software == self.recipe else "head"

    @property
    def image(self) -> Image | None:
        """The image for missing nodes; ``None`` for the bare base image."""
        own = self.own_image
        ready = [own] if own is not None and own.state == "available" else []
        if usable := [*ready, *self.cached]:
            return max(usable, key=self._rank_image)
        # If every node can install its own software, that is faster than waiting for a pending image.
        return own if self.bake == "head" else None

    def _rank_image(self, image: Image) -> tuple[bool, bool, bool, str, str]:
        """The own image may hold the head's jobs, unless it was kept; the newest has the newest base."""
        is_own = image == self.own_image
        is_kept = image.tags.get(tags.KEPT) == "yes"
        return is_own and not is_kept, bool(image.packages), is_own, image.created, image.id


def rank_instances(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return the machines in rank order: the head, then the workers by their ranks, else in launch order."""
    nodes = sorted(instances, key=lambda i: (i.role != HEAD, i.launch_time, i.launch_index, i.id))
    first_worker = 1 if nodes and nodes[0].role == HEAD else 0
    head, workers = nodes[:first_worker], nodes[first_worker:]
    if _have_ranks(workers):
        workers.sort(key=lambda node: node.rank or 0)
    return (*head, *workers)


def number_instances(instances: Iterable[Instance], wanted: int) -> dict[int, Instance]:
    """Return the machines by rank. While the cluster has fewer than ``wanted``, some ranks are missing."""
    nodes = rank_instances(instances)
    heads = nodes[:1] if nodes and nodes[0].role == HEAD else ()
    workers = nodes[len(heads) :]
    ranks = [*(0 for _ in heads), *(node.rank or 0 for node in workers)]
    if not _have_ranks(workers) or max(ranks, default=0) >= wanted:
        ranks = [*range(len(nodes))]
    return dict(zip(ranks, nodes, strict=False))


def _have_ranks(workers: Sequence[Instance]) -> bool:
    """Return whether each worker's tag gives it a rank that no other has."""
    ranks = {node.rank for node in workers}
    return len(ranks) == len(workers) and None not in ranks and 0 not in ranks


def mesh_digest(nodes: Sequence[Instance]) -> str:
    """Return a digest of the nodes in rank order, which becomes a tag of the head once they are connected."""
    return hashlib.sha256(" ".join(n.id for n in nodes).encode()).hexdigest()[:16]


def _in_place(given: PlanInput) -> list[Instance]:
    """Return the healthy machines in the most common place (type and zone)."""
    running = [i for i in given.found.alive if i.state in ("pending", "running")]
    healthy = [instance for instance in running if instance.id not in given.unhealthy]
    places = Counter(instance.place for instance in healthy)
    heads = {instance.place for instance in healthy if instance.role == HEAD}
    place = max(places, key=lambda p: (places[p], p in heads, p), default=None)
    return [instance for instance in healthy if instance.place == place]


def _sort_machines(given: PlanInput) -> tuple[tuple[Instance, ...], dict[str, str]]:
    """Return the machines to keep, in rank order, and the others by id with the reason to terminate."""
    nodes = rank_instances(_in_place(given))
    # A second head is a leftover of an interrupted move.
    keep = tuple(n for i, n in enumerate(nodes) if i == 0 or n.role != HEAD)
    # A bare machine would get the current recipe, which differs from the software of the others.
    mixed = given.software != given.recipe
    keep = tuple(n for n in keep if n.tags.get(tags.INSTALLED) or not mixed)
    keep = rank_instances(keep[: given.spec.nodes])
    kept = {instance.id for instance in keep}
    strays = [instance for instance in given.found.alive if instance.id not in kept]
    reasons = {i.id: i.state if i.is_stopped else "not needed" for i in strays}
    return keep, {id_: given.unhealthy.get(id_) or reason for id_, reason in reasons.items()}


def check_head_is_not_stopped(
    found: Inventory, flags: str, region: str, now: datetime, given_up: Container[str] = ()
) -> None:
    """Raise :class:`SprError` if the head is stopped, because its disk may hold the only copy of results.

    ``flags`` are the options that select the cluster on the command line. ``given_up`` holds the ids of
    machines that never worked.
    """
    for instance in found.alive:
        if instance.role == HEAD and instance.is_stopped and instance.id not in given_up:
            start = f"aws ec2 start-instances --region {region} --instance-ids {instance.id}"
            if instance.expires and now >= instance.expires:
                start = (
                    f"aws ec2 modify-instance-attribute --region {region} --instance-id {instance.id} "
                    "--instance-initiated-shutdown-behavior stop (its time to live is over: without "
                    "this, EC2 deletes its disk when it shuts down, 5 minutes after its start), then "
                    f"{start}, then spr-cluster fetch {flags}"
                )
            raise SprError(
                f"the head node {instance.id} is {instance.state}; it was not changed",
                hint=f"start it: {start}; or remove the cluster: spr-cluster down {flags}",
            )


def plan_up(given: PlanInput) -> Plan:
    """Plan the changes to reach the desired cluster; if there are none, the plan only verifies it.

    Raises :class:`.ForeignClusterError` if the cluster belongs to another SSH key.
    """
    check_owner(given.spec.name, given.found, given.public_key, given.now)
    keep, strays = _sort_machines(given)
    actions = [
        *_plan_removals(given, strays),
        *_plan_surroundings(given, keep),
        *_plan_machines(given, keep),
    ]
    actions = [*_plan_claim(given, changes=Plan(tuple(actions)).changes), *actions]
    # The type is unknown until the purchase, so show the highest price.
    spec, types = given.spec, _types(given, keep)
    options = {"public": not spec.private, **spec.disk_speed}
    node = given.prices.highest(types, spec.volume_gib, **options)
    price = node and replace(node, usd=node.usd * given.spec.nodes)
    return Plan(tuple(actions), price, keep)


def _types(given: PlanInput, keep: Sequence[Instance]) -> tuple[str, ...]:
    """Return the possible types of the cluster's machines."""
    return (keep[0].instance_type,) if keep else given.spec.instance_types


def expected_by_bake(given: PlanInput) -> dict[str, tuple[int, int]]:
    """Return the minimum and maximum minutes on AWS for each value of ``bake``."""
    specs = {bake: given.spec.model_copy(update={"bake": bake}) for bake in ("none", "head")}
    return {bake: plan_up(replace(given, spec=spec)).expected_min for bake, spec in specs.items()}


def _plan_removals(given: PlanInput, strays: Mapping[str, str]) -> list[Action]:
    kind, found = ActionKind, given.found
    actions = []
    if strays:
        detail = ", ".join(f"{id_} ({why})" for id_, why in strays.items())
        actions.append(Action(kind.TERMINATE, detail, tuple(strays)))
    # Keep images that the user kept. Remove failed ones, because they block the next image's name.
    useless = [
        image
        for image in found.images
        if image != given.own_image and not (image.is_sound and image.tags.get(tags.KEPT) == "yes")
    ]
    if useless:
        ids = tuple(image.id for image in useless)
        actions.append(Action(kind.DELETE_IMAGES, f"{', '.join(ids)} (not usable)", ids))
        if snapshots := tuple(s for image in useless for s in image.snapshot_ids):
            actions.append(Action(kind.DELETE_SNAPSHOTS, ", ".join(snapshots), snapshots))
    return actions


def _plan_claim(given: PlanInput, *, changes: bool) -> list[Action]:
    """Claim the cluster before any other change, so that commands with older plans stop.

    Deletes abandoned groups of other keys by ID, which can't hit a newer resource.
    """
    kind, spec = ActionKind, given.spec
    group, abandoned = split_groups(given.found, given.public_key)
    actions = []
    if given.found.guards and not spec.second_guard:
        ids = tuple(guard.id for guard in given.found.guards)
        actions.append(Action(kind.DELETE_GUARDS, ", ".join(ids), ids))
    if abandoned:
        ids = tuple(each.id for each in abandoned)
        actions.append(Action(kind.DELETE_GROUPS, f"{', '.join(ids)} (another SSH key's)", ids))
    had = group.tags if group else ()
    wanted = record_tags(spec, given.record, fingerprint(given.public_key), had)
    if group is None:
        actions.append(Action(kind.CREATE_GROUP, f"cluster {spec.name}"))
    elif changes or wanted.items() - group.tags.items():
        actions.append(Action(kind.RECORD, counted(spec.nodes, "node"), (group.id,)))
    return actions


def _plan_surroundings(given: PlanInput, keep: Sequence[Instance]) -> list[Action]:
    kind, spec, found = ActionKind, given.spec, given.found
    actions, group = [], given.group
    if group is None or not group.is_open_as(spec.ssh_cidrs, spec.caller):
        detail = f"SSH from {', '.join(spec.ssh_cidrs)}, all traffic between the nodes"
        actions.append(Action(kind.OPEN_GROUP, detail))
    foreign = [key.id for key in found.key_pairs if key.public != given.public_key]
    if foreign:
        actions.append(
            Action(kind.DELETE_KEYS, "its private key is not on this machine", tuple(foreign))
        )
    if given.public_key not in {key.public for key in found.key_pairs if key.public}:
        actions.append(Action(kind.IMPORT_KEY, "a new ed25519 key for this cluster"))
    if spec.placement_group and spec.nodes > len(keep) and not found.placement_groups:
        actions.append(Action(kind.CREATE_PLACEMENT, "places machines close together"))
    if spec.makes_role and not any(each.state == "ready" for each in found.instance_profiles):
        places = [f"read and write {spec.bucket}"] if spec.bucket else []
        places += [f"read {url}" for url in spec.read_from]
        actions.append(Action(kind.CREATE_PROFILE, f"nodes may {', '.join(places)}"))
    guarded = {id_ for guard in found.guards for id_ in guard.machines}
    bare = tuple(node.id for node in keep if node.id not in guarded)
    if spec.second_guard and (bare or spec.nodes > len(keep)):
        minutes = f"{AFTER.total_seconds() / 60:.0f} min"
        detail = f"EventBridge Scheduler terminates each machine {minutes} after its deadline"
        actions.append(Action(kind.GUARD, detail, bare))
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
        detail = "an AMI of the head, for repairs, growth, and later clusters"
        actions.append(Action(kind.BEGIN_IMAGE, detail))
    return actions


def _plan_software(given: PlanInput, keep: Sequence[Instance], missing: int) -> list[Action]:
    """Start missing nodes, from an image if possible, and install software where it is missing."""
    kind, spec, image = ActionKind, given.spec, given.image
    types = _types(given, keep)
    machine = " or ".join(types)
    what = f"{machine}, {spec.disk}"

    def run(kind: ActionKind, detail: str) -> Action:
        return Action(kind, detail, virtual=not any(map(is_metal, types)))

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
        bought = [run(first, f"{missing} x {what}, from Canonical's Ubuntu image")]
        return [*(bought if missing else ()), *_plan_install(spec, keep, missing)]
    actions = [] if keep else [run(kind.RUN_HEAD, f"1 x {what}")]
    actions += _plan_install(spec, keep, 0 if keep else 1)
    workers = missing if keep else spec.workers
    if workers or given.wants_image:
        purpose = "for the workers" if workers else "to keep"
        actions.append(Action(kind.CREATE_IMAGE, f"an AMI of the head, {purpose}"))
    if workers:
        actions.append(run(kind.RUN_WORKERS, f"{workers} x {machine}, from that image"))
    return actions


def _plan_install(spec: ClusterSpec, keep: Sequence[Instance], new: int) -> list[Action]:
    bare = [not instance.tags.get(tags.INSTALLED) for instance in keep] + [True] * new
    if not any(bare):
        return []
    where = f"{sum(bare)} nodes in parallel"
    if sum(bare) == 1:
        where = "the head" if bare[0] else "1 node"
    return [Action(ActionKind.INSTALL, f"stack {spec.stack} on {where}")]


def is_connected(keep: Sequence[Instance]) -> bool:
    """Return whether these nodes, in rank order, are already connected."""
    return bool(keep) and keep[0].tags.get(tags.MESH) == mesh_digest(keep)


_REMOVALS = (
    (ActionKind.TERMINATE, "instances"),
    (ActionKind.CANCEL_SPOT, "spot_requests"),
    (ActionKind.DELETE_IMAGES, "images"),
    (ActionKind.DELETE_SNAPSHOTS, "snapshots"),
    (ActionKind.DELETE_VOLUMES, "volumes"),
    (ActionKind.DELETE_INTERFACES, "interfaces"),
    (ActionKind.DELETE_PLACEMENTS, "placement_groups"),
    (ActionKind.DELETE_GUARDS, "guards"),
    (ActionKind.DELETE_PROFILES, "instance_profiles"),
    (ActionKind.DELETE_GROUPS, "security_groups"),
    (ActionKind.DELETE_KEYS, "key_pairs"),
)
# A machine's disks and interfaces disappear with it, and only then are its groups free. So the next round
# of `down` removes these kinds. The guards go before the security group, which records that they exist.
_AFTER_MACHINES = (
    "volumes",
    "interfaces",
    "placement_groups",
    "guards",
    "instance_profiles",
    "security_groups",
)


def plan_down(found: Inventory) -> Plan:
    """Plan the removal of resources. With machines, leave what they use to the next round."""
    ids = found.ids()
    if found.instances:
        ids = {kind: listed for kind, listed in ids.items() if kind not in _AFTER_MACHINES}
    image_snapshots = [s for image in found.images for s in image.snapshot_ids]
    if image_snapshots:
        ids["snapshots"] = sorted({*ids.get("snapshots", []), *image_snapshots})
    named = [(kind, ids[name]) for kind, name in _REMOVALS if name in ids]
    return Plan(tuple(Action(kind, ", ".join(listed), tuple(listed)) for kind, listed in named))
