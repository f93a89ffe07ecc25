"""Placement: plan each node's ranks, threads, and CPUs from its hardware. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from cluster.slurm.configuration import find_sockets, usable_memory
from infra.errors import HostError, SprError, UsageError
from infra.words import counted
from jobs.worker.runtime.cores import CoreShare, divide, group_by_node, share_cores
from jobs.worker.spec import PlacementOptions, Resources
from provision.facts import Cpu, HostFacts


def even_splits(facts: HostFacts) -> tuple[int, ...]:
    """Return the numbers of ranks that divide the node's cores evenly."""
    cores = facts.physical_cores
    return tuple(n for n in range(1, len(cores) + 1) if divide(cores, n))


def require_even_groups(name: str, facts: HostFacts, ranks: int) -> tuple[tuple[Cpu, ...], ...]:
    """Return equal groups of cores. Raises :class:`UsageError` with the numbers of ranks that work."""
    groups = divide(facts.physical_cores, ranks)
    if not groups:
        sizes = " and ".join(str(len(cores)) for cores in group_by_node(facts.physical_cores))
        raise UsageError(
            f"--ppn {ranks}: the cores of {name} (by NUMA node: {sizes}) can't be divided evenly "
            f"among {ranks} ranks",
            hint=f"use one of: {', '.join(map(str, even_splits(facts)))}",
        )
    return groups


T = TypeVar("T")

# https://huggingface.co/blog/intel-sapphire-rapids: two ranks per node, OMP_NUM_THREADS=24,
# CCL_WORKER_COUNT=2. The article means 24 threads per node, but the variable applies to each rank.
_REFERENCE_PPN, _REFERENCE_THREADS, _REFERENCE_WORKERS = 2, 24, 2


Shares = tuple[tuple[CoreShare, ...], ...]
_Layout = tuple[int, int, Shares, list[str]]
"""Ranks per node, threads per rank, the ranks' cores, and warnings."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks run: ranks per node, and per rank computing threads, oneCCL's own threads, and CPUs.

    ``shares`` are by node, in rank order, and by local rank; empty if nothing is pinned. ``interface`` is
    the network interface that has the nodes' private addresses; each rank chooses its own of several
    names. ``tcmalloc`` and ``iomp5`` are the paths of libraries to preload.
    """

    nproc_per_node: int
    omp_threads: int
    ccl_workers: int
    shares: Shares
    backend: str
    interface: str
    tcmalloc: str | None
    iomp5: str | None
    warnings: tuple[str, ...] = ()


def plan_placement(
    facts: Mapping[str, HostFacts],
    addresses: Mapping[str, str],
    options: PlacementOptions,
    backend: str,
    cores: int | None = None,
) -> Placement:
    """Divide each node's physical cores among its ranks: never more threads than cores.

    Of a job with only some ``cores`` of each node, these are numbered from 0: the queue chooses them.
    ``addresses`` are the nodes' private addresses. The rule is that of Intel's ``ipexrun``: one rank
    per NUMA node, and oneCCL's workers take cores from the computing threads. The smallest node sets
    the thread count, because every step waits for the slowest rank. Raises :class:`UsageError` if the
    options don't fit the nodes or the backend.
    """
    workers = _workers(options, backend)
    lay_out = _as_published if options.mode == "reference" else _share_out
    interfaces = [_interface(name, fact, addresses[name]) for name, fact in facts.items()]
    if cores:
        numbered = _number_cores(facts, cores)
        facts = {name: replace(fact, cpus=numbered) for name, fact in facts.items()}
    ppn, threads, shares, warnings = lay_out(facts, options, workers)
    return Placement(
        nproc_per_node=ppn,
        omp_threads=threads,
        ccl_workers=workers,
        shares=shares,
        warnings=tuple(warnings),
        backend=backend,
        interface=",".join(dict.fromkeys(interfaces)),
        tcmalloc=_common("tcmalloc", {name: fact.tcmalloc for name, fact in facts.items()}),
        iomp5=_common("libiomp5", {name: fact.iomp5 for name, fact in facts.items()}),
    )


def _number_cores(facts: Mapping[str, HostFacts], cores: int) -> tuple[Cpu, ...]:
    """Return a job's cores, on as few of Slurm's sockets as they fit, and equally many on each if possible.

    Every node with enough cores can take the job, even with the smallest sockets.
    """
    able = [fact for fact in facts.values() if len(fact.physical_cores) >= cores]
    sockets = [find_sockets(fact) for fact in able or facts.values()]
    size = min(each for _, each in sockets)
    parts = -(-cores // size)
    is_even = cores % parts == 0 and parts <= min(count for count, _ in sockets)
    width = cores // parts if is_even else size
    return tuple(Cpu(n, n, n // width, n // width) for n in range(cores))


def check_part(resources: Resources, facts: Mapping[str, HostFacts]) -> None:
    """Raise :class:`UsageError` for a part of a node that never becomes free."""
    cores, memory = resources.cores, resources.memory_gib or 0
    if not cores:
        return
    if resources.placement.mode == "reference":
        raise UsageError("--cores: not with --placement reference, which takes whole nodes")
    asked = f"--cores {cores}" + (f" --memory {memory}" if memory else "")
    able = [
        name
        for name, fact in facts.items()
        if len(fact.physical_cores) >= cores and usable_memory(fact) >= memory << 10
    ]
    if len(able) >= (resources.nodes or 1):
        return
    largest = max(facts, key=lambda name: len(facts[name].physical_cores))
    has = counted(len(facts[largest].physical_cores), "physical core")
    raise UsageError(
        f"{asked}: only {len(able)} of {counted(len(facts), 'node')} can hold that"
        if able
        else f"{asked}: no node can hold that",
        hint=f"the largest, {largest}, has {has}, and {usable_memory(facts[largest]) >> 10} GiB for jobs",
    )


def _share_out(facts: Mapping[str, HostFacts], options: PlacementOptions, workers: int) -> _Layout:
    ppn = options.nproc_per_node or _default_ppn(facts, workers)
    for name, fact in facts.items():
        _require_cores(name, len(fact.physical_cores), ppn, workers, options)
    groups = {name: require_even_groups(name, fact, ppn) for name, fact in facts.items()}
    # All groups of one node are equal.
    cores = min(len(node[0]) for node in groups.values())
    warnings = [
        f"{name} computes on {ppn * cores} of its {len(fact.physical_cores)} cores, as many as "
        "the smallest node has"
        for name, fact in facts.items()
        if ppn * cores < len(fact.physical_cores)
    ]
    shares = tuple(share_cores(node, cores, workers) for node in groups.values())
    return ppn, cores - workers, shares, warnings


def _default_ppn(facts: Mapping[str, HostFacts], workers: int) -> int:
    """Return one rank per NUMA node if every node can do that; otherwise 1."""
    ppn = min(len(fact.numa_nodes) for fact in facts.values())
    groups = [divide(fact.physical_cores, ppn) for fact in facts.values()]
    return ppn if all(node and len(node[0]) > workers for node in groups) else 1


def _require_cores(
    name: str, cores: int, ppn: int, workers: int, options: PlacementOptions
) -> None:
    if cores // ppn > workers:
        return
    flags = {"--ppn": options.nproc_per_node, "--ccl-workers": options.ccl_workers}
    asked = " ".join(f"{flag} {value}" for flag, value in flags.items() if value)
    beside = f" and {counted(workers, 'oneCCL worker')} each" if workers else ""
    raise UsageError(
        f"{asked or '--backend ccl'}: {name} has {counted(cores, 'physical core')}, too few for "
        f"{counted(ppn, 'rank')} of at least one thread{beside}",
        hint="use fewer ranks or workers, or --backend gloo, which needs no worker cores"
        if workers
        else "use fewer ranks per node",
    )


def _as_published(
    facts: Mapping[str, HostFacts], options: PlacementOptions, workers: int
) -> _Layout:
    if options.nproc_per_node or options.ccl_workers:
        raise UsageError("--placement reference sets --ppn and --ccl-workers itself: omit them")
    busy = _REFERENCE_PPN * (_REFERENCE_THREADS + workers)
    warnings = [
        f"--placement reference: {_REFERENCE_PPN} ranks of {_REFERENCE_THREADS} threads, "
        f"{workers} oneCCL workers each, and no pinning, as published"
    ]
    warnings += [
        f"{name} is oversubscribed: {busy} busy threads on {len(fact.physical_cores)} cores"
        for name, fact in facts.items()
        if busy > len(fact.physical_cores)
    ]
    return _REFERENCE_PPN, _REFERENCE_THREADS, (), warnings


def _workers(options: PlacementOptions, backend: str) -> int:
    if backend == "ccl":
        return options.ccl_workers or (_REFERENCE_WORKERS if options.mode == "reference" else 1)
    if options.ccl_workers:
        raise no_ccl_workers(backend)
    return 0


def no_ccl_workers(backend: str) -> UsageError:
    """Return the error for ``--ccl-workers`` with a backend other than oneCCL."""
    return UsageError(
        f"--ccl-workers: the backend is {backend}, which has none",
        hint="omit it, or use --backend ccl on a stack that has oneCCL",
    )


def _interface(name: str, facts: HostFacts, address: str) -> str:
    if address not in facts.interfaces:
        raise HostError(name, f"none of its network interfaces has its address {address}")
    return facts.interfaces[address]


def _common(what: str, by_node: Mapping[str, T]) -> T:
    """Return the value common to all nodes: mpirun gives all of them one environment."""
    values = set(by_node.values())
    if len(values) > 1:
        found = ", ".join(f"{name}: {value}" for name, value in by_node.items())
        raise SprError(f"the nodes differ in their {what}: {found}")
    return values.pop()


_NODE = "a node"
_KEYS = {"cores": "cores", "numa": "numa", "threads": "threads_per_core", "memory": "memory_gib"}
_LIMITS = {"cores": (1, 4096), "numa": (1, 64), "threads": (1, 8), "memory": (2, 1 << 20)}
_SHAPE = re.compile(r"[a-z]+=[0-9]{1,9}(,[a-z]+=[0-9]{1,9})*")


@dataclass(frozen=True)
class NodeShape:
    """A node of the cluster. The default is an r7iz.metal-16xl, the published recipe's machine."""

    cores: int = 32
    """Physical cores of the whole node."""
    memory_gib: int = 512
    numa: int = 1
    threads_per_core: int = 2

    def __post_init__(self) -> None:
        for key, (least, most) in _LIMITS.items():
            value = getattr(self, _KEYS[key])
            if not least <= value <= most:
                raise UsageError(f"--shape {key}={value} is out of range: {least} to {most}")
        if self.cores % self.numa:
            raise UsageError(f"--shape cores={self.cores}: not a multiple of numa={self.numa}")

    def __str__(self) -> str:
        return ",".join(f"{key}={getattr(self, name)}" for key, name in _KEYS.items())


def parse_shape(text: str) -> NodeShape:
    """Parse ``cores=64,numa=2,threads=2,memory=1024``. Raises :class:`UsageError`."""
    pairs = [pair.partition("=") for pair in text.split(",")] if _SHAPE.fullmatch(text) else []
    given = {key: int(value) for key, _, value in pairs}
    if "cores" not in given or given.keys() - _KEYS.keys():
        raise UsageError(
            f"--shape {text}: expected cores=N, and optionally numa=N, threads=N, and memory=N"
        )
    return NodeShape(**{_KEYS[key]: value for key, value in given.items()})


class Preload(NamedTuple):
    """Libraries that every rank preloads, by their paths on the node."""

    tcmalloc: str | None = None
    iomp5: str | None = None


def place_on(
    shape: NodeShape, usable: int, options: PlacementOptions, backend: str, preload: Preload
) -> Placement:
    """Return the placement of ranks on a node; ``usable`` counts each NUMA node's usable cores."""
    facts = _describe(shape, usable, preload)
    return plan_placement({_NODE: facts}, {_NODE: ""}, options, backend)


def place_on_nodes(
    shapes: Mapping[str, NodeShape], resources: Resources, backend: str, preload: Preload
) -> Placement:
    """Return the placement of ranks on nodes, whose shapes are by name."""
    facts = {
        name: _describe(shape, shape.cores // shape.numa, preload) for name, shape in shapes.items()
    }
    check_part(resources, facts)
    addresses = dict.fromkeys(shapes, "")
    return plan_placement(facts, addresses, resources.placement, backend, resources.cores)


def _describe(shape: NodeShape, usable: int, preload: Preload) -> HostFacts:
    each = shape.cores // shape.numa
    cpus = tuple(
        Cpu(node * each + core, node * each + core, node, node)
        for node in range(shape.numa)
        for core in range(usable)
    )
    return HostFacts(
        hostname=_NODE,
        kernel="",
        model="",
        amx=frozenset(),
        tile_data="",
        cpus=cpus,
        memory_total=shape.memory_gib << 20,
        # The ranks use the interface that their hostname resolves to.
        interfaces={"": ""},
        tcmalloc=preload.tcmalloc,
        iomp5=preload.iomp5,
        host_key="",
    )
