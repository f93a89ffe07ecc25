"""From the shape of a cluster's nodes to the placement of ranks in a pod, and to what the pod asks for. Pure.

One pod takes a node, except for what the node needs itself. Ranks, threads, and CPU requests follow from
one placement, so they agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.errors import UsageError
from infra.words import counted
from jobs.launchers.node_shape import NodeShape, Preload, place_on
from jobs.launchers.placement import Placement
from jobs.launchers.plan import PlacementOptions

# A machine sold with 512 GiB shows its kernel about 2 % less. GKE reserves another 17 GiB of 512, and
# evicts pods when the rest is used up:
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
_MEMORY_SHARE = 0.9
# oneCCL and Intel MPI exchange messages through it. It counts as the pod's memory.
_SHM_SHARE = 1 / 8


@dataclass(frozen=True)
class PodSize:
    """What a pod requests, which is also its limit: CPUs as Kubernetes counts them, and GiB."""

    cpus: int
    memory_gib: int
    shm_gib: int


def place_pod(
    shape: NodeShape, options: PlacementOptions, backend: str, preload: Preload
) -> tuple[Placement, PodSize]:
    """Return the placement of a pod's ranks, and the pod's size.

    Raises :class:`UsageError` for a shape or options that don't fit each other.
    """
    usable = _usable_cores(shape, options.nproc_per_node or shape.numa)
    placement = place_on(shape, usable, options, backend, preload)
    cores = placement.nproc_per_node * (placement.omp_threads + placement.ccl_workers)
    memory = int(shape.memory_gib * _MEMORY_SHARE)
    # Both hardware threads of a core: otherwise another pod computes on the second.
    size = PodSize(cores * shape.threads_per_core, memory, max(1, int(memory * _SHM_SHARE)))
    return placement, size


def _usable_cores(shape: NodeShape, ranks: int) -> int:
    """Return a NUMA node's cores without those that the node keeps; they divide evenly among the ranks.

    It keeps at least one core of each NUMA node, so that these stay equal: kubelet, the container
    runtime, and the pods of every node need CPUs, and the static CPU manager requires a reservation.
    """
    each = shape.cores // shape.numa
    parts = 1 if shape.numa % ranks == 0 else ranks // shape.numa
    if shape.numa % ranks and ranks % shape.numa:
        raise UsageError(
            f"--ppn {ranks}: {counted(shape.numa, 'NUMA node')} can't be divided evenly among "
            f"{counted(ranks, 'rank')}",
            hint=f"use a divisor or a multiple of {shape.numa}",
        )
    usable = (each - 1) // parts * parts
    if not usable:
        raise UsageError(
            f"nodes with {counted(shape.cores, 'core')} in {counted(shape.numa, 'NUMA node')} have too few "
            f"for {counted(ranks, 'rank')} each: one core of each NUMA node is for the node itself",
            hint="use fewer ranks, or describe the nodes with --cores, --numa, and --threads-per-core",
        )
    return usable
