"""Placement on nodes of a cluster that is not yours: from their shape, as the user describes it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from infra.errors import UsageError
from jobs.launchers.placement import Placement, plan_placement
from jobs.launchers.plan import PlacementOptions
from provision.facts import Cpu, HostFacts

_NODE = "a node"
_MOST = {"cores": 4096, "memory_gib": 1 << 20, "numa": 64, "threads_per_core": 8}


@dataclass(frozen=True)
class NodeShape:
    """A node of the cluster. The default is an r7iz.metal-16xl, the published recipe's machine."""

    cores: int = 32
    """Physical ones, of the whole node."""
    memory_gib: int = 512
    numa: int = 1
    threads_per_core: int = 2

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            flag, value = f"--{name.removesuffix('_gib').replace('_', '-')}", getattr(self, name)
            least = 2 if name == "memory_gib" else 1
            if not least <= value <= most:
                raise UsageError(f"{flag} {value} is out of range: {least} to {most}")
        if self.cores % self.numa:
            raise UsageError(f"--cores {self.cores}: not a multiple of --numa {self.numa}")


class Preload(NamedTuple):
    """Libraries that every rank preloads, by their paths on the node."""

    tcmalloc: str | None = None
    iomp5: str | None = None


def place_on(
    shape: NodeShape, usable: int, options: PlacementOptions, backend: str, preload: Preload
) -> Placement:
    """Return the placement of ranks on a node, of whose NUMA nodes each has so many ``usable`` cores."""
    facts = _describe(shape, usable, preload)
    return plan_placement({_NODE: facts}, {_NODE: ""}, options, backend)


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
        # The ranks use the interface of their host's name, so none needs to be named.
        interfaces={"": ""},
        tcmalloc=preload.tcmalloc,
        iomp5=preload.iomp5,
        host_key="",
    )
