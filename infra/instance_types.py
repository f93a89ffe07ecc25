"""The EC2 instance types that the tool can rent, with their prices.

Prices are for on-demand Linux in us-east-1, in US dollars per hour, as of ``PRICES_AS_OF``; other
regions differ by a few percent. Source: the EC2 instance type and pricing pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.errors import UsageError
from infra.validation import nearest

PRICES_AS_OF = "July 2026, us-east-1"
DEFAULT_INSTANCE_TYPE = "r7iz.metal-16xl"
_GPU_FAMILY = re.compile(r"(p|g|gr)\d+[a-z-]*")

# A core's tile unit computes 16 x 16 sums of 32 products in 16 cycles, two operations each.
# https://en.wikipedia.org/wiki/Advanced_Matrix_Extensions ("Tile matrix multiply unit")
_AMX_BF16_FLOP_PER_CYCLE = 1024
# EC2's DescribeInstanceTypes: ProcessorInfo.SustainedClockSpeedInGhz, by family.
_SUSTAINED_GHZ = {
    "r7iz": 3.9,
    "c7i": 3.2,
    "m7i": 3.2,
    "r7i": 3.2,
    "c8i": 3.9,
    "m8i": 3.9,
    "r8i": 3.9,
}


@dataclass(frozen=True)
class InstanceType:
    """One EC2 instance type. ``cores`` are physical; ``gbit`` is the network in Gbit/s, if known."""

    name: str
    vcpus: int
    cores: int
    sockets: int
    memory_gib: int
    gbit: float | None
    usd_per_hour: float
    amx: bool = True

    @property
    def ghz(self) -> float | None:
        """EC2's sustained all-core clock; it may be lower while AMX is in use."""
        return _SUSTAINED_GHZ.get(self.name.partition(".")[0])

    @property
    def is_metal(self) -> bool:
        """Whether it is bare metal, which takes long to start."""
        return ".metal-" in self.name

    @property
    def peak_bf16_tflops(self) -> float | None:
        """The theoretical AMX peak in bf16 at :attr:`ghz`; bare metal only."""
        if not self.amx or self.ghz is None or not self.is_metal:
            return None
        return self.cores * _AMX_BF16_FLOP_PER_CYCLE * self.ghz / 1000


_TYPES = (
    InstanceType("r7iz.metal-16xl", 64, 32, 1, 512, 25, 6.5472),
    InstanceType("r7iz.metal-32xl", 128, 64, 2, 1024, 50, 13.0944),
    InstanceType("c7i.metal-24xl", 96, 48, 1, 192, 37.5, 4.7124),
    InstanceType("c7i.metal-48xl", 192, 96, 2, 384, 50, 8.568),
    InstanceType("m7i.metal-24xl", 96, 48, 1, 384, 37.5, 5.3222),
    InstanceType("m7i.metal-48xl", 192, 96, 2, 768, 50, 9.6768),
    InstanceType("r7i.metal-24xl", 96, 48, 1, 768, 37.5, 6.9854),
    InstanceType("r7i.metal-48xl", 192, 96, 2, 1536, 50, 12.7008),
    InstanceType("c8i.metal-48xl", 192, 96, 1, 384, 75, 9.8958),
    InstanceType("c8i.metal-96xl", 384, 192, 2, 768, 100, 17.9923),
    InstanceType("m8i.metal-48xl", 192, 96, 1, 768, 75, 10.1606),
    InstanceType("m8i.metal-96xl", 384, 192, 2, 1536, 100, 20.3213),
    InstanceType("r8i.metal-48xl", 192, 96, 1, 1536, 75, 14.67),
    InstanceType("r8i.metal-96xl", 384, 192, 2, 3072, 100, 26.6726),
    InstanceType("r7iz.16xlarge", 64, 32, 1, 512, None, 5.952),
    InstanceType("m7i.16xlarge", 64, 32, 1, 256, None, 3.2256),
    InstanceType("c7i.16xlarge", 64, 32, 1, 128, None, 2.856),
    InstanceType("c7i.24xlarge", 96, 48, 1, 192, None, 4.284),
    # Small and quick to start, for baking images.
    InstanceType("c7i.xlarge", 4, 2, 1, 8, None, 0.1785),
    InstanceType("m7i.xlarge", 4, 2, 1, 16, None, 0.2016),
    # Ice Lake, the baseline of the published comparison.
    InstanceType("c6i.16xlarge", 64, 32, 1, 128, None, 2.72, amx=False),
)
BAKERS = ("c7i.xlarge", "m7i.xlarge")
"""Types that bake images, cheapest first. The software is the same on bare metal."""
INSTANCE_TYPES = {entry.name: entry for entry in _TYPES}


def find_instance_type(name: str) -> InstanceType:
    """Return a known type. Raises :class:`UsageError` with the nearest names and the types with AMX."""
    if name in INSTANCE_TYPES:
        return INSTANCE_TYPES[name]
    family = name.partition(".")[0]
    with_amx = ", ".join(entry.name for entry in _TYPES if entry.amx)
    if _GPU_FAMILY.fullmatch(family):
        what = f"{name}: {family} is a GPU type; this tool is for CPUs with AMX"
    else:
        what = f"unknown instance type {name!r}{nearest(name, INSTANCE_TYPES, 3, 0.4)}"
    raise UsageError(what, hint=f"types with AMX: {with_amx}")
