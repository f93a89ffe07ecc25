"""What a job was started with, kept in its folder on the nodes, so that it can be continued."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from jobs.spec import PlacementWish


@dataclass(frozen=True)
class Started:
    """A job as its ranks were started; ``argv`` has the nodes' paths."""

    argv: tuple[str, ...]
    nnodes: int
    nproc_per_node: int
    placement: PlacementWish
    offline: bool
    """It needs nothing from the hub."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def render(self) -> bytes:
        """As ``start.json`` holds it."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def parse_started(text: str) -> Started:
    """What :meth:`Started.render` wrote. Raises ``ValueError`` or ``TypeError`` for anything else."""
    content = json.loads(text)
    wish = PlacementWish(**content.pop("placement"))
    return Started(**{**content, "argv": tuple(content["argv"]), "placement": wish})
