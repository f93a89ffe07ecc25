"""Nodes as the user describes them: what their ranks get, and what is refused."""

from __future__ import annotations

import pytest

from infra.errors import UsageError
from jobs.places.placement import NodeShape, Preload, parse_shape, place_on
from jobs.worker.spec import PlacementOptions


def test_the_usable_cores_of_each_numa_node_are_shared_among_its_ranks() -> None:
    shape = NodeShape(cores=64, numa=2)
    placement = place_on(shape, 30, PlacementOptions(nproc_per_node=4), "gloo", Preload("a", "b"))

    assert (placement.nproc_per_node, placement.omp_threads) == (4, 15)
    assert (placement.tcmalloc, placement.iomp5, placement.interface) == ("a", "b", "")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("cores=33,numa=2", "--shape cores=33: not a multiple of numa=2"),
        ("cores=8,memory=1", "--shape memory=1 is out of range: 2 to 1048576"),
        ("cores=8,threads=9", "--shape threads=9 is out of range: 1 to 8"),
        ("cores=0", "--shape cores=0 is out of range: 1 to 4096"),
        (
            "numa=2",
            "--shape numa=2: expected cores=N, and optionally numa=N, threads=N, and memory=N",
        ),
        ("cores=8,disks=2", "--shape cores=8,disks=2: expected cores=N, and optionally"),
        ("cores=8,", "--shape cores=8,: expected cores=N, and optionally"),
        ("8", "--shape 8: expected cores=N, and optionally"),
    ],
)
def test_shapes_of_no_machine_are_refused(shape: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(shape)
    assert caught.value.message.startswith(message)


def test_a_shape_is_read_as_it_is_written() -> None:
    shape = NodeShape(cores=64, memory_gib=1024, numa=2, threads_per_core=1)

    assert str(shape) == "cores=64,numa=2,threads=1,memory=1024"
    assert parse_shape(str(shape)) == shape
    assert parse_shape("cores=64") == NodeShape(cores=64)
