"""Nodes as the user describes them: what their ranks get, and what is refused."""

from __future__ import annotations

from jobs.places.placement import NodeShape, Preload, parse_shape, place_on
from jobs.worker.spec import PlacementOptions


def test_the_usable_cores_of_each_numa_node_are_shared_among_its_ranks() -> None:
    shape = NodeShape(cores=64, numa=2)
    placement = place_on(shape, 30, PlacementOptions(nproc_per_node=4), "gloo", Preload("a", "b"))

    assert (placement.nproc_per_node, placement.omp_threads) == (4, 15)
    assert (placement.tcmalloc, placement.iomp5, placement.interface) == ("a", "b", "")


def test_a_shape_is_read_as_it_is_written() -> None:
    shape = NodeShape(cores=64, memory_gib=1024, numa=2, threads_per_core=1)

    assert str(shape) == "cores=64,numa=2,threads=1,memory=1024"
    assert parse_shape(str(shape)) == shape
    assert parse_shape("cores=64") == NodeShape(cores=64)
