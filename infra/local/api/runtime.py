"""The part of EC2's state that belongs to the running server and is not saved."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Protocol

from infra.local.machines.containers import NodeContainers


class ServerClock(Protocol):
    """EC2's clock, in seconds since 1970: :mod:`time`, or a replacement in tests."""

    def time(self) -> float: ...


class Conditions:
    """What varies on AWS: here, nothing takes time. Tests have worse days."""

    boot_s: float = 0
    image_s: float = 0
    terminate_s: float = 0

    def refresh(self) -> None:
        """Update the conditions."""


class Runtime:
    """A server's containers, clock, and conditions."""

    def __init__(
        self, containers: NodeContainers, clock: ServerClock, conditions: Conditions
    ) -> None:
        self.containers, self.clock, self.conditions = containers, clock, conditions

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


class Part:
    """A part of a region's EC2. It finds the other parts as attributes of the backend."""

    def __init__(self, ec2: Any) -> None:
        self._ec2 = ec2
        self._runtime: Runtime = ec2.runtime


def replace_backends(backends: Any, account: str, kind: Any) -> None:
    """Make moto serve an account with this kind of backend in every region."""
    regions = backends[account]
    regions.clear()
    regions.backend = kind
