"""EC2 instance types, with a table of facts that EC2's API does not report: AMX, sockets, and prices.

The tool can use any x86-64 type, in the table or not. Table prices are for on-demand Linux in
``TABLE_REGION``, in US dollars per hour, as of ``TABLE_DATE``; :mod:`infra.cost.prices` fetches current
ones. Source: the EC2 instance type and pricing pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.errors import UsageError
from infra.words import nearest

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

TABLE_DATE, TABLE_REGION = "July 2026", "us-east-1"
DEFAULT_INSTANCE_TYPE = "r7iz.metal-16xl"
_NAME = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_GPU_FAMILY = re.compile(r"(p|g|gr)\d+[a-z-]*")
# AMX first appeared in Sapphire Rapids, the processor of EC2's seventh Intel generation.
_AMX_FAMILY = re.compile(r"(c7i|m7i|r7i|r7iz|c8i|m8i|r8i)d?(-flex)?")
_FIRST_WITH_AMX = 7

# A core's tile unit computes 16 x 16 dot products of length 32 in 16 cycles: 2 FLOP per element.
# https://en.wikipedia.org/wiki/Advanced_Matrix_Extensions ("Tile matrix multiply unit")
_AMX_BF16_FLOP_PER_CYCLE = 1024
# EC2's DescribeInstanceTypes: ProcessorInfo.SustainedClockSpeedInGhz, by family.
_SUSTAINED_GHZ = {
    "r7iz": 3.9,
    "c7i": 3.2,
    "m7i": 3.2,
    "r7i": 3.2,
    "c8i": 3.9,
    "c8id": 3.9,
    "m8i": 3.9,
    "m8id": 3.9,
    "r8i": 3.9,
    "r8id": 3.9,
}
# Five days: EC2's longest idle limit for a TCP connection, and its only one until 2025.
_LONGEST_IDLE_S = 432_000


@dataclass(frozen=True)
class InstanceType:
    """One EC2 instance type. ``cores`` are physical; ``gbit`` is the network bandwidth in Gbit/s.

    ``amx`` is ``None`` if only the running machine can tell.
    """

    name: str
    vcpus: int
    cores: int
    sockets: int | None
    memory_gib: float
    gbit: float | None
    table_usd: float | None
    amx: bool | None = True
    idle_tcp_s: int = _LONGEST_IDLE_S
    """How long security groups track an idle TCP connection by default, in seconds."""

    @staticmethod
    def from_aws(info: Any) -> InstanceType:
        """Parse an entry of DescribeInstanceTypes; sockets and AMX come from the table."""
        name, network = info["InstanceType"], info.get("NetworkInfo", {})
        known = INSTANCE_TYPES.get(name)
        cpus = info["VCpuInfo"]
        cards = network.get("NetworkCards", [])
        # Virtual machines can exceed their baseline in bursts.
        gbit = sum(card.get("BaselineBandwidthInGbps", 0) for card in cards)
        tracking = network.get("ConnectionTrackingConfiguration", {})
        return InstanceType(
            name=name,
            vcpus=cpus["DefaultVCpus"],
            cores=cpus.get("DefaultCores") or cpus["DefaultVCpus"],
            sockets=known.sockets if known else None,
            memory_gib=info["MemoryInfo"]["SizeInMiB"] / 1024,
            gbit=known.gbit if known else (gbit or None) if info.get("BareMetal") else None,
            table_usd=known.table_usd if known else None,
            amx=known.amx if known else _guess_amx(name, info["ProcessorInfo"]),
            idle_tcp_s=tracking.get("DefaultTcpEstablishedTimeout", _LONGEST_IDLE_S),
        )

    @property
    def ghz(self) -> float | None:
        """EC2's sustained all-core clock; it may be lower while AMX is in use."""
        return _SUSTAINED_GHZ.get(self.name.partition(".")[0])

    @property
    def is_metal(self) -> bool:
        """Whether it is bare metal, which is slow to start."""
        return is_metal(self.name)

    @property
    def peak_bf16_tflops(self) -> float | None:
        """The theoretical AMX peak in bf16 at :attr:`ghz`; bare metal only."""
        if not self.amx or self.ghz is None or not self.is_metal:
            return None
        return self.cores * _AMX_BF16_FLOP_PER_CYCLE * self.ghz / 1000


def _guess_amx(name: str, processor: Any) -> bool | None:
    family = name.partition(".")[0]
    if has_amx_by_name(name):
        return True
    generation = re.match(r"[a-z]+(\d+)", family)
    is_old = generation is not None and int(generation[1]) < _FIRST_WITH_AMX
    return False if is_old or processor.get("Manufacturer") == "AMD" else None


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
    # Variants with local disks; no source lists their prices.
    InstanceType("c8id.metal-48xl", 192, 96, 1, 384, 75, None),
    InstanceType("c8id.metal-96xl", 384, 192, 2, 768, 100, None),
    InstanceType("m8id.metal-48xl", 192, 96, 1, 768, 75, None),
    InstanceType("m8id.metal-96xl", 384, 192, 2, 1536, 100, None),
    InstanceType("r8id.metal-48xl", 192, 96, 1, 1536, 75, None),
    InstanceType("r8id.metal-96xl", 384, 192, 2, 3072, 100, None),
    InstanceType("r7iz.16xlarge", 64, 32, 1, 512, None, 5.952),
    InstanceType("m7i.16xlarge", 64, 32, 1, 256, None, 3.2256),
    InstanceType("c7i.16xlarge", 64, 32, 1, 128, None, 2.856),
    InstanceType("c7i.24xlarge", 96, 48, 1, 192, None, 4.284),
    # Small and quick to start: c7i.large is for `make aws-check`, the others bake images.
    InstanceType("c7i.large", 2, 1, 1, 4, None, 0.08925),
    InstanceType("c7i.xlarge", 4, 2, 1, 8, None, 0.1785),
    InstanceType("m7i.xlarge", 4, 2, 1, 16, None, 0.2016),
    # Ice Lake without AMX: the baseline of the published comparison.
    InstanceType("c6i.16xlarge", 64, 32, 1, 128, None, 2.72, amx=False),
)
BAKERS = ("c7i.xlarge", "m7i.xlarge")
"""Types that bake images, cheapest first. Images work on bare metal as well."""
INSTANCE_TYPES = {entry.name: entry for entry in _TYPES}
_FAMILIES = dict.fromkeys(entry.name.partition(".")[0] for entry in _TYPES if entry.amx)
WITH_AMX = f"families with AMX: {', '.join(_FAMILIES)}; their types: https://aws.amazon.com/ec2/instance-types/"


def is_metal(name: str) -> bool:
    """Return whether a type is bare metal, by its name."""
    return name.partition(".")[2].startswith("metal")


def has_amx_by_name(name: str) -> bool:
    """Return whether a type's family has AMX."""
    return _AMX_FAMILY.fullmatch(name.partition(".")[0]) is not None


def nearest_type(name: str, names: Iterable[str]) -> str:
    """Return :func:`infra.words.nearest` among the types with AMX."""
    return nearest(name, filter(has_amx_by_name, names), 3, 0.4)


def complete_type_name(name: str) -> str:
    """Return the family's smallest bare metal for a name such as ``r7iz.metal``, which EC2 does not have."""
    sizes = [entry for entry in _TYPES if entry.name.startswith(f"{name}-") and is_metal(name)]
    return min(sizes, key=lambda entry: entry.vcpus).name if sizes else name


def check_type_name(name: str) -> str:
    """Return a plausible type name unchanged. Raises :class:`UsageError` for others and for GPU types."""
    family = name.partition(".")[0]
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"unknown instance type {name!r}{nearest_type(name, INSTANCE_TYPES)}", hint=WITH_AMX
        )
    if _GPU_FAMILY.fullmatch(family):
        raise UsageError(
            f"{name}: {family} is a GPU type; this tool is for CPUs with AMX", hint=WITH_AMX
        )
    return name


def find_machine(ec2: EC2Client, name: str) -> InstanceType | None:
    """Look up a type in the table, else in EC2; ``None`` if the region does not offer it."""
    if name in INSTANCE_TYPES:
        return INSTANCE_TYPES[name]
    # InstanceTypes=[name] would raise an error for a type that the region lacks; a filter does not.
    found = ec2.describe_instance_types(Filters=[{"Name": "instance-type", "Values": [name]}])
    return next((InstanceType.from_aws(info) for info in found["InstanceTypes"]), None)
