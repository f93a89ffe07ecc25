"""What EC2's state needs from the running server, and what is never saved with it."""

from __future__ import annotations

from typing import Any

from infra.local.clock import ServerClock
from infra.local.containers import NodeContainers
from infra.local.faults import ActiveFaults


class Runtime:
    """A server's containers, clock, and faults: one object per region, shared by all its parts."""

    containers: NodeContainers
    clock: ServerClock
    faults: ActiveFaults

    def __init__(
        self, containers: NodeContainers, clock: ServerClock, faults: ActiveFaults
    ) -> None:
        self.attach(containers, clock, faults)

    def attach(self, containers: NodeContainers, clock: ServerClock, faults: ActiveFaults) -> None:
        """Continue with these, in the server that has loaded the state."""
        self.containers, self.clock, self.faults = containers, clock, faults

    def __getstate__(self) -> dict[str, Any]:
        return {}
