"""A node's cores divided among its ranks, for nodes that are planned from here. Pure."""

from __future__ import annotations

from infra.errors import UsageError
from jobs.worker.runtime.cores import divide, group_by_node
from provision.facts import Cpu, HostFacts


def core_groups(facts: HostFacts, ranks: int) -> tuple[tuple[Cpu, ...], ...]:
    """Divide the node's physical cores into ``ranks`` equal groups; empty if impossible."""
    return divide(facts.physical_cores, ranks)


def even_splits(facts: HostFacts) -> tuple[int, ...]:
    """Return the numbers of ranks that divide the node's cores evenly."""
    return tuple(n for n in range(1, len(facts.physical_cores) + 1) if core_groups(facts, n))


def require_even_groups(name: str, facts: HostFacts, ranks: int) -> tuple[tuple[Cpu, ...], ...]:
    """Return :func:`core_groups`. Raises :class:`UsageError` with the numbers of ranks that work."""
    groups = core_groups(facts, ranks)
    if not groups:
        sizes = " and ".join(str(len(cores)) for cores in group_by_node(facts.physical_cores))
        raise UsageError(
            f"--ppn {ranks}: the cores of {name} (by NUMA node: {sizes}) can't be divided evenly "
            f"among {ranks} ranks",
            hint=f"use one of: {', '.join(map(str, even_splits(facts)))}",
        )
    return groups
