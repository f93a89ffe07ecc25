"""The part of EC2's state that belongs to the running server and is never saved."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Protocol

from infra.local.faults import ActiveFaults
from infra.local.machines.containers import NodeContainers


class ServerClock(Protocol):
    """EC2's time, in seconds since 1970: :mod:`time`, unless a test skips the wait for a boot."""

    def time(self) -> float: ...


class Runtime:
    """A server's containers, clock, and faults."""

    def __init__(
        self, containers: NodeContainers, clock: ServerClock, faults: ActiveFaults
    ) -> None:
        self.containers, self.clock, self.faults = containers, clock, faults

    def attach(self, other: Runtime) -> None:
        """Continue with these, in the server that has loaded the state."""
        vars(self).update(vars(other))

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def now(self) -> float:
        return self.clock.time()

    def moto_now(self) -> datetime:
        """Return the time as moto keeps it: UTC without a time zone."""
        return datetime.fromtimestamp(self.now(), timezone.utc).replace(tzinfo=None)
