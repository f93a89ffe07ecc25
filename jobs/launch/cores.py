"""A node's cores divided among its ranks: CPUs that compute and CPUs for oneCCL's workers. Pure."""

from __future__ import annotations

from infra.errors import UsageError
from jobs.worker.batch.pinning import CoreShare, cpu_mask
from provision.facts import Cpu, HostFacts


def core_groups(facts: HostFacts, ranks: int) -> tuple[tuple[Cpu, ...], ...]:
    """Divide the node's physical cores into ``ranks`` equal groups along NUMA nodes; empty if impossible.

    A rank gets a whole NUMA node, an equal part of one, or several whole ones.
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
    """Return the physical cores of each NUMA node; the nodes of a socket (sub-NUMA) stay neighbors."""
    groups: dict[int, list[Cpu]] = {}
    for core in facts.physical_cores:
        groups.setdefault(core.node, []).append(core)
    nodes = sorted(groups, key=lambda node: (groups[node][0].socket, node))
    return [tuple(groups[node]) for node in nodes]


def even_splits(facts: HostFacts) -> tuple[int, ...]:
    """Return the numbers of ranks that divide the node's cores evenly."""
    return tuple(n for n in range(1, len(facts.physical_cores) + 1) if core_groups(facts, n))


def require_even_groups(name: str, facts: HostFacts, ranks: int) -> tuple[tuple[Cpu, ...], ...]:
    """Return :func:`core_groups`. Raises :class:`UsageError` with the numbers of ranks that work."""
    groups = core_groups(facts, ranks)
    if not groups:
        sizes = " and ".join(str(len(cores)) for cores in _cores_by_numa_node(facts))
        raise UsageError(
            f"--ppn {ranks}: the cores of {name} (by NUMA node: {sizes}) can't be divided evenly "
            f"among {ranks} ranks",
            hint=f"use one of: {', '.join(map(str, even_splits(facts)))}",
        )
    return groups


def share_cores(
    groups: tuple[tuple[Cpu, ...], ...], cores_per_rank: int, workers: int
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
    # Masks ascend, as Intel's tools write them; each share moves with its mask.
    return tuple(sorted(shares, key=lambda share: cpu_mask(share.cpus)))
