"""The part of EC2's state that belongs to the running server and is not saved."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Protocol

from infra.local.faults import ActiveFaults
from infra.local.machines.containers import NodeContainers


class ServerClock(Protocol):
    """EC2's clock, in seconds since 1970: :mod:`time`, or a replacement in tests."""

    def time(self) -> float: ...


class Runtime:
    """A server's containers, clock, and faults."""

    def __init__(
        self, containers: NodeContainers, clock: ServerClock, faults: ActiveFaults
    ) -> None:
        self.containers, self.clock, self.faults = containers, clock, faults

    def attach(self, other: Runtime) -> None:
        """Take over the other runtime's attributes after loading a saved state."""
        vars(self).update(vars(other))

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def now(self) -> float:
        return self.clock.time()

    def moto_now(self) -> datetime:
        """Return the time in moto's format: UTC without a time zone."""
        return datetime.fromtimestamp(self.now(), timezone.utc).replace(tzinfo=None)
