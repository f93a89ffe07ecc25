"""One node's cores, shared among its ranks: which CPUs compute, which carry oneCCL. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infra.errors import UsageError
from provision.facts import Cpu, HostFacts


@dataclass(frozen=True)
class CoreShare:
    """One rank's part of its node, in the kernel's CPU and NUMA numbers.

    ``cpus`` compute, ``workers`` are oneCCL's. ``numa`` is the NUMA node that all of them lie in,
    ``None`` where they lie in several: memory then goes where the thread is that first writes it.
    """

    cpus: tuple[int, ...]
    workers: tuple[int, ...]
    numa: int | None


def cpu_mask(cpus: Iterable[int]) -> int:
    """The CPUs as bits of a number."""
    return sum(1 << cpu for cpu in cpus)


def core_groups(facts: HostFacts, ranks: int) -> tuple[tuple[Cpu, ...], ...]:
    """The node's physical cores in ``ranks`` equal groups along its NUMA nodes; empty if that fails.

    A NUMA node goes to one rank, or in equal parts to several; or a rank gets several whole ones.
    """
    nodes = _cores_by_numa_node(facts)
    if ranks == 1:
        return (tuple(core for cores in nodes for core in cores),)
    size = len(nodes[0])
    if any(len(cores) != size for cores in nodes):
        return ()
    if len(nodes) % ranks == 0:
        each = len(nodes) // ranks
        merged = (nodes[first : first + each] for first in range(0, len(nodes), each))
        return tuple(tuple(core for cores in group for core in cores) for group in merged)
    parts, rest = divmod(ranks, len(nodes))
    if rest or size % parts:
        return ()
    width = size // parts
    return tuple(cores[i : i + width] for cores in nodes for i in range(0, size, width))


def _cores_by_numa_node(facts: HostFacts) -> list[tuple[Cpu, ...]]:
    """The physical cores of each NUMA node; the nodes of a socket (sub-NUMA) stay neighbours."""
    groups: dict[int, list[Cpu]] = {}
    for core in facts.physical_cores:
        groups.setdefault(core.node, []).append(core)
    nodes = sorted(groups, key=lambda node: (groups[node][0].socket, node))
    return [tuple(groups[node]) for node in nodes]


def even_splits(facts: HostFacts) -> tuple[int, ...]:
    """The numbers of ranks among which the node's cores can be shared evenly."""
    return tuple(n for n in range(1, len(facts.physical_cores) + 1) if core_groups(facts, n))


def require_even(name: str, facts: HostFacts, ranks: int) -> tuple[tuple[Cpu, ...], ...]:
    """:func:`core_groups`, or :class:`UsageError` with what would go."""
    groups = core_groups(facts, ranks)
    if not groups:
        sizes = " and ".join(str(len(cores)) for cores in _cores_by_numa_node(facts))
        raise UsageError(
            f"--ppn {ranks}: the cores of {name} (by NUMA node: {sizes}) can't be shared evenly "
            f"among {ranks} ranks",
            hint=f"these go: {', '.join(map(str, even_splits(facts)))}",
        )
    return groups


def share_cores(
    groups: tuple[tuple[Cpu, ...], ...], cores_per_rank: int, workers: int
) -> tuple[CoreShare, ...]:
    """The ranks' shares: the first cores of each group to oneCCL's workers, the rest computes.

    So does Intel's ``ipexrun``. Only the first hyper-thread of each core is in a share: two busy
    threads of one core share its AMX unit, and with as many CPUs as threads none can meet another.
    """
    shares = []
    for group in groups:
        mine = group[:cores_per_rank]
        cpus = [core.cpu for core in mine]
        nodes = {core.node for core in mine}
        numa = nodes.pop() if len(nodes) == 1 else None
        shares.append(CoreShare(tuple(sorted(cpus[workers:])), tuple(cpus[:workers]), numa))
    # Masks go out ascending, as Intel's tools write them; a rank's share goes with its mask.
    return tuple(sorted(shares, key=lambda share: cpu_mask(share.cpus)))
