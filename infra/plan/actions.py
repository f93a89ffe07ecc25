"""The actions of ``up`` and ``down`` as data: shown to the user, then applied. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infra.cost.prices import Price
from infra.ec2.instances import Instance
from infra.instance_types import METAL_BOOT_MIN, VIRTUAL_BOOT_MIN


class ActionKind(Enum):
    """Every change that the tool makes. The value is the title of its phase."""

    CREATE_GROUP = "Security group"
    OPEN_GROUP = "Security rules"
    RECORD = "Record"
    IMPORT_KEY = "Key pair"
    CREATE_PLACEMENT = "Placement group"
    GUARD = "Second guard"
    CREATE_PROFILE = "Role of the nodes"
    RUN_HEAD = "Head node"
    RUN_NODES = "Nodes"
    PROMOTE = "New head"
    REACH = "Reach the nodes"
    INSTALL = "Software"
    CREATE_IMAGE = "Image"
    WAIT_IMAGE = "Image on its way"
    BEGIN_IMAGE = "Image in the background"
    RUN_WORKERS = "Workers"
    CONNECT = "Connect the nodes"
    VERIFY = "Verify"
    TERMINATE = "Terminate"
    CANCEL_SPOT = "Spot requests"
    DELETE_IMAGES = "Images"
    DELETE_SNAPSHOTS = "Snapshots"
    DELETE_VOLUMES = "Volumes"
    DELETE_INTERFACES = "Network interfaces"
    DELETE_GUARDS = "Second guards"
    DELETE_PROFILES = "Roles of the nodes"
    DELETE_PLACEMENTS = "Placement groups"
    DELETE_GROUPS = "Security groups"
    DELETE_KEYS = "Key pairs"


_READ_ONLY = {ActionKind.REACH, ActionKind.VERIFY}
_RUNS = {ActionKind.RUN_HEAD, ActionKind.RUN_NODES, ActionKind.RUN_WORKERS}
_BUYS = {ActionKind.CREATE_GROUP, *_RUNS}

# Expected minimum and maximum minutes on AWS. Images have taken over 50.
EXPECTED_MIN = {
    ActionKind.RUN_HEAD: METAL_BOOT_MIN,
    ActionKind.RUN_NODES: METAL_BOOT_MIN,
    ActionKind.INSTALL: (5, 15),
    ActionKind.CREATE_IMAGE: (5, 50),
    ActionKind.WAIT_IMAGE: (1, 50),
    ActionKind.RUN_WORKERS: METAL_BOOT_MIN,
    ActionKind.BEGIN_IMAGE: (1, 3),
}


@dataclass(frozen=True)
class Action:
    """One change to the resources in ``ids``."""

    kind: ActionKind
    detail: str
    ids: tuple[str, ...] = ()
    virtual: bool = False
    """Whether the action starts virtual machines, which boot much faster than bare metal."""

    @property
    def title(self) -> str:
        return f"{self.kind.value}: {self.detail}"

    @property
    def expected_min(self) -> tuple[int, int] | None:
        """Minimum and maximum minutes on AWS; ``None`` for actions that take seconds."""
        return VIRTUAL_BOOT_MIN if self.virtual else EXPECTED_MIN.get(self.kind)


@dataclass(frozen=True)
class Plan:
    """Actions in order. ``price`` is the cluster's hourly on-demand price, if known."""

    actions: tuple[Action, ...]
    price: Price | None = None
    keep: tuple[Instance, ...] = ()
    """The machines to keep, in rank order."""

    @property
    def changes(self) -> bool:
        """Whether the plan does more than verify the cluster."""
        return any(action.kind not in _READ_ONLY for action in self.actions)

    @property
    def buys(self) -> bool:
        """Whether the plan needs purchase offers."""
        return any(action.kind in _BUYS for action in self.actions)

    @property
    def expected_min(self) -> tuple[int, int]:
        """Minimum and maximum minutes on AWS."""
        known = [minutes for action in self.actions if (minutes := action.expected_min)]
        return sum(low for low, _ in known), sum(high for _, high in known)

    @property
    def start_min(self) -> int:
        """Minutes on AWS until the last node has booted, even if it boots slowly; 0 if none is bought."""
        last = max(
            (i for i, action in enumerate(self.actions) if action.kind in _RUNS), default=None
        )
        if last is None:
            return 0
        low, _ = Plan(self.actions[:last]).expected_min
        return low + (self.actions[last].expected_min or METAL_BOOT_MIN)[1]

    @property
    def terminations(self) -> tuple[Action, ...]:
        return tuple(a for a in self.actions if a.kind is ActionKind.TERMINATE)
