"""AWS's bill for one region's machines, from what happened to them.

Nothing here is the tool's: the prices are those that this cloud publishes, and the times are its own.
Machines are billed while they run, at least a minute per start, disks until they are deleted, and public
IPv4 addresses until the machine ends.

https://aws.amazon.com/ec2/pricing/on-demand/, https://aws.amazon.com/ebs/pricing/
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moto.ec2.models.instances import Instance

from tests.cloud.prices import on_demand_usd, spot_usd

_HOUR_S, _MONTH_H, _LEAST_S = 3600.0, 720.0, 60.0
_GIB_MONTH_USD, _ADDRESS_HOUR_USD = 0.08, 0.005
_MIB_S_MONTH_USD, _FREE_MIB_S = 0.04, 125


@dataclass
class Use:
    """A machine's use in seconds since 1970; an end is ``None`` until it has come."""

    usd_per_hour: float
    disk_usd_per_hour: float
    created: float
    has_address: bool = False
    runs: list[list[float | None]] = field(default_factory=list)
    ended: float | None = None
    deleted: float | None = None

    def start(self, now: float) -> None:
        self.runs.append([now, None])

    def stop(self, now: float) -> None:
        if self.runs and self.runs[-1][1] is None:
            self.runs[-1][1] = now

    def bill(self, now: float) -> float:
        """Return the US dollars until now."""

        def seconds(begin: float | None, end: float | None) -> float:
            return (now if end is None else end) - (begin or 0.0)

        running = sum(max(_LEAST_S, seconds(*run)) for run in self.runs)
        usd = running / _HOUR_S * self.usd_per_hour
        usd += max(_LEAST_S, seconds(self.created, self.deleted)) / _HOUR_S * self.disk_usd_per_hour
        if self.has_address:
            usd += seconds(self.created, self.ended) / _HOUR_S * _ADDRESS_HOUR_USD
        return usd


@dataclass
class Meter:
    """The use of every machine that there has been, by ID."""

    conditions: Any
    uses: dict[str, Use] = field(default_factory=dict)

    def create(self, instance: Instance, now: float, gib: int, mib_s: int, *, spot: bool) -> None:
        """Begin with a machine that was launched; it does not run yet."""
        zone = instance.placement.zone
        usd = on_demand_usd(self.conditions, instance.instance_type, zone[:-1])
        if spot:
            usd = spot_usd(self.conditions, instance.instance_type, zone)
        month = gib * _GIB_MONTH_USD
        month += max(0, mib_s - _FREE_MIB_S) * _MIB_S_MONTH_USD
        disk = month / _MONTH_H * self.conditions.price_factor
        self.uses[instance.id] = Use(usd, disk, now, bool(instance.public_ip))

    def bill(self, now: float) -> dict[str, float]:
        """Return the US dollars of each machine until now."""
        return {id_: use.bill(now) for id_, use in self.uses.items()}
