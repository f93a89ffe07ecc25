"""Divide a machine's cores among its ranks: CPUs for computing and for oneCCL's workers. Pure, except for
:func:`read_cores`. Runs on Python 3.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

_SYSTEM = Path("/sys/devices/system")
LIMITS = ("python3", "-I", "-S", "/etc/slurm/spr-cluster-limits")
"""The program provision/on_node/limits.py on every node."""


class NumberedCore(Protocol):
    """A physical core: one of its CPUs, its socket, and its NUMA node, by kernel number."""

    @property
    def cpu(self) -> int: ...

    @property
    def socket(self) -> int: ...

    @property
    def node(self) -> int: ...


AnyCore = TypeVar("AnyCore", bound=NumberedCore)


@dataclass(frozen=True)
class CoreShare:
    """One rank's cores, by kernel CPU and NUMA number.

    ``cpus`` compute, ``workers`` belong to oneCCL. ``numa`` is the NUMA node that contains all of them.
    It is ``None`` if they span several; memory is then allocated near the thread that first writes it.
    """

    cpus: tuple[int, ...]
    workers: tuple[int, ...]
    numa: int | None


class LocalCore(NamedTuple):
    """A physical core of this machine, with the lowest of its CPUs that this process may use."""

    cpu: int
    socket: int
    node: int


def cpu_mask(cpus: Iterable[int]) -> int:
    """Return the CPUs as a bit mask."""
    return sum(1 << cpu for cpu in cpus)


def group_by_node(cores: Sequence[AnyCore]) -> list[tuple[AnyCore, ...]]:
    """Return the cores of each NUMA node; the nodes of a socket (sub-NUMA) stay neighbors."""
    groups: dict[int, list[AnyCore]] = {}
    for core in cores:
        groups.setdefault(core.node, []).append(core)
    nodes = sorted(groups, key=lambda node: (groups[node][0].socket, node))
    return [tuple(groups[node]) for node in nodes]


def divide(cores: Sequence[AnyCore], ranks: int) -> tuple[tuple[AnyCore, ...], ...]:
    """Divide cores into ``ranks`` equal groups along NUMA nodes; empty if impossible.

    A rank gets a whole NUMA node, a part of one, or several whole ones.
    """
    nodes = group_by_node(cores)
    if ranks == 1:
        return (tuple(core for node in nodes for core in node),)
    if len(nodes) % ranks == 0 and len({*map(len, nodes)}) == 1:
        each = len(nodes) // ranks
        merged = (nodes[first : first + each] for first in range(0, len(nodes), each))
        return tuple(tuple(core for node in group for core in node) for group in merged)
    width, rest = divmod(len(cores), ranks)
    if rest or any(len(node) % width for node in nodes):
        return ()
    return tuple(node[i : i + width] for node in nodes for i in range(0, len(node), width))


def share_cores(
    groups: Sequence[Sequence[NumberedCore]], cores_per_rank: int, workers: int
) -> tuple[CoreShare, ...]:
    """Give the first cores of each group to oneCCL's workers and the rest to computing threads.

    Intel's ``ipexrun`` does the same. Only the first hyper-thread of each core is used, because two
    busy threads of one core share its AMX unit, and because a rank with as many CPUs as threads never
    runs two of them on one CPU.
    """
    shares = []
    for group in groups:
        mine = group[:cores_per_rank]
        cpus = [core.cpu for core in mine]
        nodes = {core.node for core in mine}
        numa = nodes.pop() if len(nodes) == 1 else None
        shares.append(CoreShare(tuple(sorted(cpus[workers:])), tuple(cpus[:workers]), numa))
    # In ascending order of masks, as Intel's tools write them.
    return tuple(sorted(shares, key=lambda share: cpu_mask(share.cpus)))


def read_cores(allowed: Iterable[int], system: Path = _SYSTEM) -> list[LocalCore]:
    """Read the physical cores of some CPUs from the kernel. Raises :class:`OSError`."""
    found: dict[tuple[int, int], LocalCore] = {}
    for cpu in sorted(allowed):
        folder = system / "cpu" / f"cpu{cpu}"
        socket, core = (
            int((folder / "topology" / name).read_text())
            for name in ("physical_package_id", "core_id")
        )
        # A link to the NUMA node's folder; missing without NUMA.
        nodes = [int(link.name[len("node") :]) for link in folder.glob("node[0-9]*")]
        found.setdefault((socket, core), LocalCore(cpu, socket, nodes[0] if nodes else 0))
    return list(found.values())
