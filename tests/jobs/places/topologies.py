"""Invented machines as ``lscpu`` shows them: sockets, sub-NUMA clusters, odd numbers, SMT."""

from __future__ import annotations

from collections.abc import Sequence

from provision.facts import HostFacts, parse_facts
from tests.fakes import facts_answer


def machine(
    cores: int,
    *,
    sockets: int = 1,
    numa: int = 1,
    smt: bool = False,
    interface: str = "ens5",
    allowed: str = "",
    iomp5: str = "",
) -> HostFacts:
    """``cores`` and ``numa`` nodes in all; second hyper-threads are numbered after all cores."""
    rows = [(core, core, core * sockets // cores, core * numa // cores) for core in range(cores)]
    if smt:
        rows += [(cores + cpu, core, socket, node) for cpu, core, socket, node in rows]
    return from_rows(rows, allowed, interface, iomp5)


def interleaved(cores: int, *, smt: bool = False) -> HostFacts:
    """Two sockets, whose cores are numbered in turn; with SMT the threads of a core are neighbours."""
    threads = 2 if smt else 1
    rows = [
        (threads * core + thread, core // 2, core % 2, core % 2)
        for core in range(cores)
        for thread in range(threads)
    ]
    return from_rows(rows)


def from_rows(
    rows: Sequence[tuple[int, int, int, int]],
    allowed: str = "",
    interface: str = "ens5",
    iomp5: str = "",
) -> HostFacts:
    """``rows`` are (CPU, core, socket, NUMA node); ``allowed`` is the kernel's list, or all."""
    answer = facts_answer(
        topology="\n".join(",".join(map(str, row)) for row in rows),
        allowed=allowed or ",".join(str(row[0]) for row in rows),
        interface=interface,
        iomp5=iomp5,
    )
    return parse_facts(answer)
