"""Instance types compared by what the same work costs on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from infra.cost.prices import Price, Prices
from infra.errors import UsageError
from infra.instance_types import FAMILIES, INSTANCE_TYPES, WITH_AMX, InstanceType, nearest_type

_FEWEST_VCPUS = 64


@dataclass(frozen=True)
class ComparedType:
    """A type with AMX and its prices per hour, if known; ``spot`` is the cheapest zone's."""

    type: InstanceType
    price: Price | None
    spot: float | None

    @property
    def usd_per_pflops_hour(self) -> float | None:
        """The price on demand of an hour of 10^15 bf16 operations per second, at the AMX peak."""
        tflops = self.type.amx_tflops
        return None if self.price is None or not tflops else 1000 * self.price.usd / tflops

    @property
    def usd_to_boot(self) -> float | None:
        """The price on demand of the longest expected start."""
        return None if self.price is None else self.price.usd * self.type.boot_minutes / 60

    def as_dict(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        kind, work, boot = self.type, self.usd_per_pflops_hour, self.usd_to_boot
        return {
            "type": kind.name,
            "vcpus": kind.vcpus,
            "cores": kind.cores,
            "memory_gib": kind.memory_gib,
            "gbit": kind.gbit,
            "amx_tflops": round(kind.amx_tflops or 0, 1),
            "throttled": kind.is_flex,
            "usd_per_hour": self.price and self.price.usd,
            "spot_usd_per_hour": self.spot,
            "prices_as_of": self.price and self.price.source,
            "usd_per_pflops_hour": None if work is None else round(work, 2),
            "boot_minutes": kind.boot_minutes,
            "usd_to_boot": None if boot is None else round(boot, 2),
        }


@dataclass(frozen=True)
class MeasuredJob:
    """A finished job on some nodes of a type: its seconds of computing, and the others without the boot.

    A job with ``--cores`` has a part of each node, and pays the same part on any type.
    """

    type: InstanceType
    nodes: float
    computing_s: float
    other_s: float

    def as_dict(self, each: ComparedType) -> dict[str, Any]:
        """Return what the job takes and costs on a type, with its longest expected boot."""
        own, peak = self.type.amx_tflops or 0.0, each.type.amx_tflops or 0.0
        slower = own / peak if peak else float("nan")
        minutes = each.type.boot_minutes + (self.computing_s * slower + self.other_s) / 60
        usd = each.price and each.price.usd * self.nodes * minutes / 60
        basis = "measured" if each.type.name == self.type.name else "projection"
        return {
            "job_minutes": round(minutes, 1),
            "job_usd": usd and round(usd, 2),
            "job_basis": basis,
        }


def choose_types(names: Sequence[str], *, every: bool) -> tuple[InstanceType, ...]:
    """Return the types of some families or names; of all families without names.

    Without ``every``, those of families begin at 64 vCPUs. Raises :class:`UsageError` for a name that is in
    neither.
    """
    found = dict[str, InstanceType]()
    for name in names or FAMILIES:
        sizes = [each for each in INSTANCE_TYPES.values() if each.name.startswith(f"{name}.")]
        if name in INSTANCE_TYPES:
            sizes = [INSTANCE_TYPES[name]]
        elif not every:
            sizes = [each for each in sizes if each.vcpus >= _FEWEST_VCPUS]
        if name not in FAMILIES and name not in INSTANCE_TYPES:
            near = nearest_type(name, [*INSTANCE_TYPES, *FAMILIES])
            raise UsageError(f"unknown instance type {name!r}{near}", hint=WITH_AMX)
        found |= {each.name: each for each in sizes if each.amx}
    return tuple(found.values())


def compare_types(types: Iterable[InstanceType], prices: Prices) -> list[ComparedType]:
    """Return the types, the cheapest for the same work first; those without a price come last."""
    found = []
    for each in types:
        spot = [usd for (name, _), usd in prices.spot.items() if name == each.name]
        found.append(ComparedType(each, prices.machines.get(each.name), min(spot, default=None)))

    def cost(each: ComparedType) -> tuple[float, int, str]:
        work = each.usd_per_pflops_hour
        return float("inf") if work is None else round(work, 2), each.type.vcpus, each.type.name

    return sorted(found, key=cost)


def find_cheaper(
    kind: InstanceType, prices: Prices, most: float
) -> tuple[InstanceType, float] | None:
    """Return the type whose work is cheapest, and what it costs: at most ``most`` of ``kind``.

    Only types with as much of AMX and at most twice as much count, so that the same number of nodes does.
    """
    (own,) = compare_types([kind], prices)
    work, peak = own.usd_per_pflops_hour, kind.amx_tflops
    if work is None or peak is None:
        return None
    similar = [
        each
        for each in INSTANCE_TYPES.values()
        if not each.is_flex and each.amx_tflops and peak <= each.amx_tflops <= 2 * peak
    ]
    best, *_ = compare_types(similar, prices)
    cost = best.usd_per_pflops_hour
    return (best.type, cost / work) if cost is not None and cost <= most * work else None
