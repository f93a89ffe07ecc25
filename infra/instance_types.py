"""EC2 instance types, with a table of facts that EC2's API does not report: AMX, sockets, and prices.

The tool can use any x86-64 type, in the table or not. Table prices are for on-demand Linux in
``TABLE_REGION``, in US dollars per hour, as of ``TABLE_DATE``; :mod:`infra.cost.prices` fetches current
ones. Source: the EC2 instance type and pricing pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from infra.errors import UsageError
from infra.words import nearest

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

TABLE_DATE, TABLE_REGION = "July 2026", "us-east-1"
DEFAULT_INSTANCE_TYPE = "r7iz.metal-16xl"
_NAME = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_GPU_FAMILY = re.compile(r"(p|g|gr)\d+[a-z-]*")
# A, C, D, H, I, M, R, T, Z: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-resource-limits.html
_STANDARD = re.compile(r"(a|c|d|h|i|im|is|m|r|t|z)\d.*")
# AMX first appeared in Sapphire Rapids, the processor of EC2's seventh Intel generation.
_FIRST_WITH_AMX = 7

# A core's tile unit computes 16 x 16 dot products of length 32 in 16 cycles: 2 FLOP per element.
# https://en.wikipedia.org/wiki/Advanced_Matrix_Extensions ("Tile matrix multiply unit")
_AMX_BF16_FLOP_PER_CYCLE = 1024
# Expected minimum and maximum minutes from the purchase to SSH. Bare metal has taken over 20:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/launching-instance.html
METAL_BOOT_MIN, VIRTUAL_BOOT_MIN = (5, 20), (1, 3)
# Five days: EC2's longest idle limit for a TCP connection, and its only one until 2025.
_LONGEST_IDLE_S = 432_000


@dataclass(frozen=True)
class InstanceType:
    """One EC2 instance type. ``cores`` are physical; ``gbit`` is the first network card's Gbit/s.

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
        # Virtual machines can exceed their baseline in bursts. The machines get one interface, on card 0.
        gbit = next((card.get("BaselineBandwidthInGbps") for card in cards), None)
        tracking = network.get("ConnectionTrackingConfiguration", {})
        return InstanceType(
            name=name,
            vcpus=cpus["DefaultVCpus"],
            cores=cpus.get("DefaultCores") or cpus["DefaultVCpus"],
            sockets=known.sockets if known else None,
            memory_gib=info["MemoryInfo"]["SizeInMiB"] / 1024,
            gbit=known.gbit if known else gbit if info.get("BareMetal") else None,
            table_usd=known.table_usd if known else None,
            amx=known.amx if known else _guess_amx(name, info["ProcessorInfo"]),
            idle_tcp_s=tracking.get("DefaultTcpEstablishedTimeout", _LONGEST_IDLE_S),
        )

    @property
    def ghz(self) -> float | None:
        """EC2's sustained all-core clock; it may be lower while AMX is in use."""
        family = FAMILIES.get(self.name.partition(".")[0])
        return family.ghz if family else None

    @property
    def is_metal(self) -> bool:
        """Whether it is bare metal, which is slow to start."""
        return is_metal(self.name)

    @property
    def boot_minutes(self) -> int:
        """The longest time that it is expected to take to start, in minutes."""
        return (METAL_BOOT_MIN if self.is_metal else VIRTUAL_BOOT_MIN)[1]

    @property
    def is_flex(self) -> bool:
        """Whether EC2 slows it down under continuous load."""
        return self.name.partition(".")[0].endswith("-flex")

    @property
    def amx_tflops(self) -> float | None:
        """The theoretical AMX peak of its cores in bf16 at :attr:`ghz`, if both are known."""
        if not self.amx or self.ghz is None:
            return None
        return self.cores * _AMX_BF16_FLOP_PER_CYCLE * self.ghz / 1000

    @property
    def peak_bf16_tflops(self) -> float | None:
        """:attr:`amx_tflops` of bare metal, which no other machine shares."""
        return self.amx_tflops if self.is_metal else None


class _Family(NamedTuple):
    """The sizes of a family with AMX; a core has two vCPUs, and a socket at most ``socket`` of them.

    ``gib`` are each vCPU's; ``usd`` is its price as a virtual machine, and ``others`` has the sizes with
    another price, such as bare metal. ``gbit`` is the bandwidth that sizes have all the time, by their vCPUs.
    """

    name: str
    gib: int
    usd: float
    others: Mapping[str, float]
    ghz: float
    socket: int
    vcpus: Sequence[int]
    gbit: Mapping[int, float]

    def types(self) -> Iterator[InstanceType]:
        """Yield the types, smallest first."""
        names = {_size_name(vcpus): vcpus * self.usd for vcpus in self.vcpus} | dict(self.others)
        for size, usd in sorted(names.items(), key=lambda each: _count_vcpus(each[0])):
            count = _count_vcpus(size)
            gbit = self.gbit.get(count)
            sockets, memory = -(-count // self.socket), count * self.gib
            yield InstanceType(
                f"{self.name}.{size}", count, count // 2, sockets, memory, gbit, round(usd, 6)
            )


def _size_name(vcpus: int) -> str:
    small = {2: "large", 4: "xlarge"}
    return small.get(vcpus) or f"{vcpus // 4}xlarge"


def _count_vcpus(size: str) -> int:
    """Return the vCPUs of a size such as ``large``, ``16xlarge``, or ``metal-24xl``."""
    if size == "large":
        return 2
    return 4 * int(re.sub("[^0-9]", "", size) or 1)


def _guess_amx(name: str, processor: Any) -> bool | None:
    family = name.partition(".")[0]
    if has_amx_by_name(name):
        return True
    generation = re.match(r"[a-z]+(\d+)", family)
    is_old = generation is not None and int(generation[1]) < _FIRST_WITH_AMX
    return False if is_old or processor.get("Manufacturer") == "AMD" else None


# Seventh generation: c7i, m7i, r7i. Eighth: c8i, m8i, r8i, and others. Flex types: "up to" a bandwidth.
_SIZES_7 = (2, 4, 8, 16, 32, 48, 64, 96, 192)
_SIZES_8 = (*_SIZES_7[:-1], 128, 192, 384)
_SIZES_FLEX = _SIZES_7[:7]
_GBIT_7 = {32: 12.5, 48: 18.75, 64: 25.0, 96: 37.5, 192: 50.0}
_GBIT_8 = {32: 15.0, 48: 22.5, 64: 30.0, 96: 40.0, 128: 50.0, 192: 75.0, 256: 80.0, 384: 100.0}


def _seventh(name: str, gib: int, usd: float, metal_24xl: float, metal_48xl: float) -> _Family:
    metal = {"metal-24xl": metal_24xl, "metal-48xl": metal_48xl}
    return _Family(name, gib, usd, metal, 3.2, 96, _SIZES_7, _GBIT_7)


def _eighth(name: str, gib: int, usd: float, metal_48xl: float, metal_96xl: float) -> _Family:
    metal = {"metal-48xl": metal_48xl, "metal-96xl": metal_96xl}
    return _Family(name, gib, usd, metal, 3.9, 192, _SIZES_8, _GBIT_8)


def _flex(name: str, gib: int, usd: float, ghz: float) -> _Family:
    return _Family(name, gib, usd, {}, ghz, 96, _SIZES_FLEX, {})


# Sizes, memory, clocks (SustainedClockSpeedInGhz), and bandwidths: DescribeInstanceTypes. Prices: the Price
# List API's of 2026-07-20 for us-east-1, as karpenter-provider-aws 1d927085 has them in
# pkg/providers/pricing/zz_generated.pricing_aws.go.
_FAMILIES = (
    _Family(
        name="r7iz",
        gib=8,
        usd=0.093,
        others={"metal-16xl": 6.5472, "metal-32xl": 13.0944},
        ghz=3.9,
        socket=64,
        vcpus=(*_SIZES_FLEX, 128),
        gbit={32: 12.5, 48: 25.0, 64: 25.0, 128: 50.0},
    ),
    _seventh("c7i", 2, 0.044625, 4.7124, 8.568),
    _seventh("m7i", 4, 0.0504, 5.32224, 9.6768),
    _seventh("r7i", 8, 0.06615, 6.98544, 12.7008),
    _eighth("c8i", 2, 0.046855, 9.89578, 17.99232),
    _eighth("m8i", 4, 0.05292, 10.16064, 20.32128),
    _eighth("r8i", 8, 0.06946, 14.66995, 26.67264),
    # With local disks
    _eighth("c8id", 2, 0.05544, 11.70893, 21.28896),
    _eighth("m8id", 4, 0.06526, 12.52992, 25.05984),
    _eighth("r8id", 8, 0.08316, 17.56339, 31.93344),
    _seventh("i7i", 8, 0.0943802, 9.6204, 19.2408)._replace(gbit={}),
    _seventh("i7ie", 8, 0.12995, 13.2844, 26.5687)._replace(
        vcpus=(2, 4, 8, 12, 24, 48, 72, 96, 192), gbit={192: 100.0}
    ),
    # More memory
    _eighth("x8i", 16, 0.109415, 23.10845, 48.74438)._replace(
        others={"metal-48xl": 23.10845, "metal-96xl": 48.74438, "96xlarge": 48.74438},
        vcpus=(*_SIZES_8[:-1], 256),
    ),
    _flex("c7i-flex", 2, 0.04239375, 3.2),
    _flex("m7i-flex", 4, 0.04788, 3.2),
    _flex("c8i-flex", 2, 0.04451, 3.9),
    _flex("m8i-flex", 4, 0.050275, 3.9),
    _flex("r8i-flex", 8, 0.065985, 3.9),
)
FAMILIES = {family.name: family for family in _FAMILIES}
"""The families with AMX."""
# Ice Lake without AMX: the baseline of the published comparison.
_BASELINE = InstanceType("c6i.16xlarge", 64, 32, 1, 128, None, 2.72, amx=False)
BAKERS = ("c7i.xlarge", "m7i.xlarge")
"""Types that bake images, cheapest first. Images work on bare metal as well."""
INSTANCE_TYPES = {entry.name: entry for family in _FAMILIES for entry in family.types()} | {
    _BASELINE.name: _BASELINE
}
WITH_AMX = "families with AMX: {}; `spr-cluster types` compares them".format(", ".join(FAMILIES))


def is_metal(name: str) -> bool:
    """Return whether a type is bare metal, by its name."""
    return name.partition(".")[2].startswith("metal")


def is_standard(types: Iterable[str]) -> bool:
    """Return whether all types count toward EC2's standard quotas; X and HPC types have separate ones."""
    return all(_STANDARD.fullmatch(name) for name in types)


def has_amx_by_name(name: str) -> bool:
    """Return whether a type's family has AMX."""
    return name.partition(".")[0] in FAMILIES


def nearest_type(name: str, names: Iterable[str]) -> str:
    """Return :func:`infra.words.nearest` among the types with AMX."""
    return nearest(name, filter(has_amx_by_name, names), 3, 0.4)


def complete_type_name(name: str) -> str:
    """Return the family's smallest bare metal for a name such as ``r7iz.metal``, which EC2 does not have."""
    known = INSTANCE_TYPES.values()
    sizes = [entry for entry in known if entry.name.startswith(f"{name}-") and is_metal(name)]
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
