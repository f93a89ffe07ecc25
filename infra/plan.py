"""What ``up`` and ``down`` will do, as data: shown to the user, then applied. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infra.inventory import Inventory
from infra.spec import ClusterSpec


class ActionKind(Enum):
    """Every change that the tool makes; the value is the phase's title."""

    CREATE_GROUP = "Security group"
    IMPORT_KEY = "Key pair"
    RUN_HEAD = "Head node"
    INSTALL = "Software"
    CREATE_IMAGE = "Image"
    RUN_WORKERS = "Workers"
    CONNECT = "Connect the nodes"
    VERIFY = "Verify"
    TERMINATE = "Terminate"
    DELETE_IMAGES = "Images"
    DELETE_SNAPSHOTS = "Snapshots"
    DELETE_VOLUMES = "Volumes"
    DELETE_INTERFACES = "Network interfaces"
    DELETE_GROUPS = "Security groups"
    DELETE_KEYS = "Key pairs"


@dataclass(frozen=True)
class Action:
    """One change. ``ids`` are the resources that it takes away."""

    kind: ActionKind
    detail: str
    ids: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.kind.value}: {self.detail}"


@dataclass(frozen=True)
class Plan:
    """Actions in their order. Money in US dollars, without disks, images and traffic."""

    actions: tuple[Action, ...]
    usd_per_hour: float = 0.0
    usd_at_most: float = 0.0


def plan_up(spec: ClusterSpec) -> Plan:
    """The reference recipe: a head, its software, an image of it, the workers from that image."""
    kind, machine = ActionKind, spec.machine
    actions = [
        Action(kind.CREATE_GROUP, f"SSH from {spec.ssh_cidr}, everything between the nodes"),
        Action(kind.IMPORT_KEY, "ed25519, made for this cluster"),
        Action(kind.RUN_HEAD, f"1 x {machine.name}, {spec.volume_gib} GiB encrypted gp3"),
        Action(kind.INSTALL, f"stack {spec.stack} on the head"),
    ]
    if spec.workers:
        actions += [
            Action(kind.CREATE_IMAGE, "an AMI of the head, for the workers"),
            Action(kind.RUN_WORKERS, f"{spec.workers} x {machine.name}, from that image"),
        ]
    actions += [
        Action(kind.CONNECT, "node-to-node SSH, names, hostfile"),
        Action(kind.VERIFY, "every node reachable from the head, AMX on every node"),
    ]
    usd_per_hour = machine.usd_per_hour * spec.nodes
    hours = spec.ttl.total_seconds() / 3600
    return Plan(tuple(actions), usd_per_hour, usd_per_hour * hours)


def plan_down(found: Inventory, *, keep_image: bool) -> Plan:
    """Take away what was found, in the order in which EC2 lets go of it."""
    kind = ActionKind
    ids = found.ids()
    image_snapshots = [s for image in found.images for s in image.snapshot_ids]
    snapshots = sorted({*ids.get("snapshots", []), *image_snapshots})
    steps: list[tuple[ActionKind, list[str]]] = [(kind.TERMINATE, ids.get("instances", []))]
    if not keep_image:
        steps += [(kind.DELETE_IMAGES, ids.get("images", [])), (kind.DELETE_SNAPSHOTS, snapshots)]
    steps += [
        (kind.DELETE_VOLUMES, ids.get("volumes", [])),
        (kind.DELETE_INTERFACES, ids.get("interfaces", [])),
        (kind.DELETE_GROUPS, ids.get("security_groups", [])),
        (kind.DELETE_KEYS, ids.get("key_pairs", [])),
    ]
    return Plan(
        tuple(Action(what, ", ".join(which), tuple(which)) for what, which in steps if which)
    )
