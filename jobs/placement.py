"""From what the nodes are to how many ranks and threads each gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from infra.errors import HostError, SprError, UsageError
from provision.facts import HostFacts

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """Ranks per node, and per rank: computing threads and oneCCL's own threads."""

    nproc_per_node: int
    omp_threads: int
    ccl_workers: int
    interface: str
    """The network interface of the nodes' private addresses."""
    tcmalloc: str | None


def plan_placement(
    facts: Mapping[str, HostFacts],
    addresses: Mapping[str, str],
    *,
    nproc_per_node: int | None,
    ccl_workers: int,
) -> Placement:
    """Share each node's physical cores among its ranks: never more threads than cores.

    ``addresses`` are the nodes' private addresses. The rule is that of Intel's ``ipexrun``: a rank
    per NUMA node, and the cores of oneCCL's workers taken off the computing threads. The smallest
    node decides, because every step waits for the slowest rank. Raises :class:`UsageError` where
    the wished ranks do not fit.
    """
    cores = {name: len(fact.physical_cores) for name, fact in facts.items()}
    smallest = min(cores, key=lambda name: cores[name])
    ppn = nproc_per_node or min(len(fact.numa_nodes) for fact in facts.values())
    threads = cores[smallest] // ppn - ccl_workers
    if threads < 1 and nproc_per_node:
        raise UsageError(
            f"--ppn {ppn}: {smallest} has {cores[smallest]} physical cores, too few for "
            f"{ppn} ranks of at least one thread and {ccl_workers} oneCCL workers"
        )
    return Placement(
        nproc_per_node=ppn,
        omp_threads=max(1, threads),
        ccl_workers=ccl_workers,
        interface=_common(
            "network interface",
            {name: _interface(name, fact, addresses[name]) for name, fact in facts.items()},
        ),
        tcmalloc=_common("tcmalloc", {name: fact.tcmalloc for name, fact in facts.items()}),
    )


def _interface(name: str, facts: HostFacts, address: str) -> str:
    if address not in facts.interfaces:
        raise HostError(name, f"none of its network interfaces has its address {address}")
    return facts.interfaces[address]


def _common(what: str, by_node: Mapping[str, T]) -> T:
    """The value that all nodes share: mpirun gives one environment to all of them."""
    values = set(by_node.values())
    if len(values) > 1:
        told = ", ".join(f"{name}: {value}" for name, value in by_node.items())
        raise SprError(f"the nodes differ in their {what}: {told}")
    return values.pop()
