"""Nodes as the user describes them: what their ranks get, and what is refused."""

from __future__ import annotations

import pytest

from infra.errors import UsageError
from jobs.launchers.placement import NodeShape, Preload, place_on
from jobs.worker.spec import PlacementOptions


def test_the_usable_cores_of_each_numa_node_are_shared_among_its_ranks() -> None:
    shape = NodeShape(cores=64, numa=2)
    placement = place_on(shape, 30, PlacementOptions(nproc_per_node=4), "gloo", Preload("a", "b"))

    assert (placement.nproc_per_node, placement.omp_threads) == (4, 15)
    assert (placement.tcmalloc, placement.iomp5, placement.interface) == ("a", "b", "")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"cores": 33, "numa": 2}, "--cores 33: not a multiple of --numa 2"),
        ({"memory_gib": 1}, "--memory 1 is out of range: 2 to"),
        ({"threads_per_core": 9}, "--threads-per-core 9 is out of range: 1 to 8"),
    ],
)
def test_shapes_of_no_machine_are_refused(shape: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        NodeShape(**shape)
