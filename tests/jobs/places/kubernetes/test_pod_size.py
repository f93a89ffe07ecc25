"""Ranks, threads, and CPU requests agree on nodes of every shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import UsageError
from jobs.places.kubernetes.request import PodSize, place_pod
from jobs.places.placement import NodeShape, Placement, Preload
from jobs.worker.spec import PlacementOptions
from tests.jobs.places.kubernetes.rendering import KINDS, rendered
from tests.jobs.places.kubernetes.test_manifests import pod_of

NOTHING = Preload("", None)


def place(
    shape: NodeShape, ppn: int | None = None, workers: int | None = None
) -> tuple[Placement, PodSize]:
    backend = "ccl" if workers else "gloo"
    return place_pod(shape, PlacementOptions("auto", ppn, workers), backend, NOTHING)


@pytest.mark.parametrize(
    ("shape", "ppn", "workers", "expected"),
    [
        (NodeShape(), None, None, (1, 31, 62)),
        (NodeShape(), 2, None, (2, 15, 60)),
        (NodeShape(threads_per_core=1), None, None, (1, 31, 31)),
        (NodeShape(cores=64, numa=2), None, None, (2, 31, 124)),
        (NodeShape(cores=64, numa=2), 4, 1, (4, 14, 120)),
        (NodeShape(cores=192, numa=6), 3, None, (3, 62, 372)),
        (NodeShape(cores=2, memory_gib=4), None, None, (1, 1, 2)),
    ],
)
def test_known_machines(
    shape: NodeShape, ppn: int | None, workers: int | None, expected: tuple[int, int, int]
) -> None:
    placement, size = place(shape, ppn, workers)

    assert (placement.nproc_per_node, placement.omp_threads, size.cpus) == expected


@pytest.mark.parametrize(
    ("gib", "allocatable"), [(16, 13.0), (32, 27.7), (44, 38.7), (88, 79.2), (512, 485.0)]
)
def test_a_pod_fits_what_gke_lets_pods_request(gib: int, allocatable: float) -> None:
    _, size = place(NodeShape(memory_gib=gib), None, None)

    assert 0.8 * allocatable < size.memory_gib <= allocatable - 0.5


@st.composite
def shapes(draw: st.DrawFn) -> NodeShape:
    numa = draw(st.integers(1, 8))
    return NodeShape(
        cores=numa * draw(st.integers(1, 48)),
        memory_gib=draw(st.integers(2, 4096)),
        numa=numa,
        threads_per_core=draw(st.integers(1, 4)),
    )


@settings(max_examples=25)
@given(
    shape=shapes(),
    ppn=st.none() | st.integers(1, 16),
    workers=st.none() | st.integers(1, 3),
    kind=st.sampled_from(KINDS),
)
def test_ranks_threads_and_cpus_always_agree(
    shape: NodeShape, ppn: int | None, workers: int | None, kind: str
) -> None:
    words = ["--kind", kind, "--stack", "intel" if workers else "upstream"]
    words += ["--shape", str(shape)]
    words += ["--ppn", f"{ppn}"] if ppn else []
    words += ["--ccl-workers", f"{workers}"] if workers else []
    try:
        job = rendered(*words).job
    except UsageError:
        each = shape.cores // shape.numa - 1
        ranks = ppn or 1
        uneven = shape.numa % ranks and ranks % shape.numa
        cores = each * shape.numa
        assert uneven or cores // ranks <= (workers or 0) or ranks > cores
        return

    (container,) = pod_of(job)["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    spec = job["spec"]
    ranks = int(spec["nprocPerNode"]) if kind == "PyTorchJob" else spec["trainer"]["numProcPerNode"]
    per_rank = int(env["OMP_NUM_THREADS"]) + int(env.get("CCL_WORKER_COUNT", 0))
    requests = container["resources"]["requests"]
    assert ranks == (ppn or ranks)
    assert int(requests["cpu"]) == ranks * per_rank * shape.threads_per_core
    assert int(requests["cpu"]) <= (shape.cores - shape.numa) * shape.threads_per_core
    assert 0 < int(requests["memory"].removesuffix("Gi")) < shape.memory_gib
    assert container["resources"]["limits"] == requests
