"""From what the nodes are to how many ranks and threads each gets, and on which CPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from infra.errors import HostError, SprError, UsageError
from jobs.launch.cores import CoreShare, core_groups, require_even, share_cores
from jobs.launch.plan import PlacementOptions
from provision.facts import HostFacts

T = TypeVar("T")

# https://huggingface.co/blog/intel-sapphire-rapids: two ranks per node, OMP_NUM_THREADS=24,
# CCL_WORKER_COUNT=2. Its text means 24 threads a node, but the variable counts for every rank.
_REFERENCE_PPN, _REFERENCE_THREADS, _REFERENCE_WORKERS = 2, 24, 2


@dataclass(frozen=True)
class RankLayout:
    """Ranks per node, and per rank: computing threads, oneCCL's own threads, and their CPUs."""

    nproc_per_node: int
    omp_threads: int
    ccl_workers: int
    shares: tuple[tuple[CoreShare, ...], ...]
    """By node, in the nodes' order, and by local rank; empty where nothing is pinned."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where the ranks run, and what they find there: libraries to load first (paths), network."""

    ranks: RankLayout
    interface: str
    """The network interface of the nodes' private addresses."""
    tcmalloc: str | None = None
    iomp5: str | None = None
    fabric: str = "tcp"


def plan_placement(
    facts: Mapping[str, HostFacts],
    addresses: Mapping[str, str],
    wish: PlacementOptions,
    backend: str,
) -> Placement:
    """CoreShare each node's physical cores among its ranks: never more threads than cores.

    ``addresses`` are the nodes' private addresses. The rule is that of Intel's ``ipexrun``: a rank
    per NUMA node, and the cores of oneCCL's workers taken off the computing threads. The smallest
    node decides, because every step waits for the slowest rank. Raises :class:`UsageError` where
    the wish does not fit the nodes or the backend.
    """
    _require_fabric(wish, backend, facts)
    workers = _workers(wish, backend)
    lay_out = _as_published if wish.mode == "reference" else _share_out
    interfaces = {name: _interface(name, fact, addresses[name]) for name, fact in facts.items()}
    return Placement(
        ranks=lay_out(facts, wish, workers),
        interface=_common("network interface", interfaces),
        tcmalloc=_common("tcmalloc", {name: fact.tcmalloc for name, fact in facts.items()}),
        iomp5=_common("libiomp5", {name: fact.iomp5 for name, fact in facts.items()}),
        fabric=wish.fabric,
    )


def _share_out(facts: Mapping[str, HostFacts], wish: PlacementOptions, workers: int) -> RankLayout:
    ppn = wish.nproc_per_node or _default_ppn(facts, workers)
    for name, fact in facts.items():
        _require_cores(name, len(fact.physical_cores), ppn, workers, wish)
    groups = {name: require_even(name, fact, ppn) for name, fact in facts.items()}
    # Of one node all groups are equal.
    cores = min(len(node[0]) for node in groups.values())
    warnings = tuple(
        f"{name} computes on {ppn * cores} of its {len(fact.physical_cores)} cores: the smallest "
        "node decides"
        for name, fact in facts.items()
        if ppn * cores < len(fact.physical_cores)
    )
    shares = tuple(share_cores(node, cores, workers) for node in groups.values())
    return RankLayout(ppn, cores - workers, workers, shares, warnings)


def _default_ppn(facts: Mapping[str, HostFacts], workers: int) -> int:
    """A rank per NUMA node, where every node can do that; otherwise one with all cores."""
    ppn = min(len(fact.numa_nodes) for fact in facts.values())
    groups = [core_groups(fact, ppn) for fact in facts.values()]
    return ppn if all(node and len(node[0]) > workers for node in groups) else 1


def _require_cores(name: str, cores: int, ppn: int, workers: int, wish: PlacementOptions) -> None:
    if cores // ppn > workers:
        return
    flags = {"--ppn": wish.nproc_per_node, "--ccl-workers": wish.ccl_workers}
    asked = " ".join(f"{flag} {value}" for flag, value in flags.items() if value)
    beside = f" and {workers} oneCCL workers each" if workers else ""
    raise UsageError(
        f"{asked or '--backend ccl'}: {name} has {cores} physical cores, too few for {ppn} ranks "
        f"of at least one thread{beside}",
        hint="fewer ranks or workers, or --backend gloo, which needs no cores of its own"
        if workers
        else "fewer ranks per node",
    )


def _as_published(
    facts: Mapping[str, HostFacts], wish: PlacementOptions, workers: int
) -> RankLayout:
    if wish.nproc_per_node or wish.ccl_workers:
        raise UsageError(
            "--placement reference brings its own --ppn and --ccl-workers: leave them out"
        )
    busy = _REFERENCE_PPN * (_REFERENCE_THREADS + workers)
    warnings = [
        f"--placement reference: {_REFERENCE_PPN} ranks of {_REFERENCE_THREADS} threads, "
        f"{workers} oneCCL workers each and no pinning, as published"
    ]
    warnings += [
        f"{name} is oversubscribed: {busy} busy threads on {len(fact.physical_cores)} cores"
        for name, fact in facts.items()
        if busy > len(fact.physical_cores)
    ]
    return RankLayout(_REFERENCE_PPN, _REFERENCE_THREADS, workers, (), tuple(warnings))


def _workers(wish: PlacementOptions, backend: str) -> int:
    if backend == "ccl":
        return wish.ccl_workers or (_REFERENCE_WORKERS if wish.mode == "reference" else 1)
    if wish.ccl_workers:
        raise UsageError(
            f"--ccl-workers {wish.ccl_workers}: the backend is {backend}, which has none",
            hint="--backend ccl, on a stack that has it, or leave --ccl-workers out",
        )
    return 0


def _require_fabric(wish: PlacementOptions, backend: str, facts: Mapping[str, HostFacts]) -> None:
    if wish.fabric != "efa":
        return
    if backend != "ccl":
        raise UsageError(
            f"--fabric efa: the backend {backend} speaks TCP only", hint="--backend ccl uses it"
        )
    without = [name for name, fact in facts.items() if not fact.efa]
    if without:
        raise UsageError(
            f"--fabric efa: no EFA device on {', '.join(without)}",
            hint="the type must have EFA, its network interface must be one, and its driver there",
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
