"""Placement from facts: a table of machines of every shape."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import HostError, UsageError
from jobs.places.placement import Placement, plan_placement
from jobs.worker.spec import PlacementOptions
from provision.facts import HostFacts
from tests.jobs.places.topologies import from_rows, interleaved, machine

R7IZ = machine(32, smt=True)


def plan(
    *facts: HostFacts, ppn: int | None = None, workers: int = 0, mode: str = "auto", **more: str
) -> Placement:
    """Plan a placement on these nodes; over oneCCL if it has workers."""
    by_name = {f"node{rank}": fact for rank, fact in enumerate(facts)}
    addresses = dict.fromkeys(by_name, "172.31.0.10")
    options = PlacementOptions(mode, ppn, workers or None, **more)
    return plan_placement(by_name, addresses, options, "ccl" if workers else "gloo")


def cpus(placement: Placement, node: int = 0) -> list[tuple[int, ...]]:
    return [share.cpus for share in placement.shares[node]]


@pytest.mark.parametrize("smt", [False, True])
@pytest.mark.parametrize(
    ("facts", "ppn", "threads"),
    [
        ({"cores": 64, "sockets": 2, "numa": 2}, 2, 31),  # r7iz.metal-32xl
        ({"cores": 96, "sockets": 2, "numa": 2}, 2, 47),  # c7i.metal-48xl
        ({"cores": 32, "numa": 4}, 4, 7),  # sub-NUMA clusters of four
        ({"cores": 96}, 1, 95),  # c8i.metal-48xl, 8th generation
        ({"cores": 96, "numa": 3}, 3, 31),  # the same, with its three compute dies as nodes
        ({"cores": 192, "sockets": 2, "numa": 2}, 2, 95),  # c8i.metal-96xl
        ({"cores": 192, "sockets": 2, "numa": 6}, 6, 31),
    ],
)
def test_one_rank_per_numa_node_is_the_default(
    facts: dict[str, Any], ppn: int, threads: int, smt: bool
) -> None:
    placement = plan(machine(**facts, smt=smt), workers=1)

    assert (placement.nproc_per_node, placement.omp_threads) == (ppn, threads)
    assert [share.numa for share in placement.shares[0]] == list(range(ppn))
    each = facts["cores"] // ppn
    assert cpus(placement) == [tuple(range(i * each + 1, (i + 1) * each)) for i in range(ppn)]


_IN_TURN = from_rows([(cpu, cpu, cpu // 4 % 2, cpu // 4) for cpu in range(16)])
"""The NUMA nodes' numbers alternate between the sockets."""
_GAPS = from_rows([(8 + 3 * i, 40 + 2 * i, 0, 7) for i in range(4)])


@pytest.mark.parametrize(
    ("facts", "ppn", "expected"),
    [
        (machine(64, sockets=2, numa=2), 1, [(tuple(range(64)), None)]),
        (_IN_TURN, 2, [((0, 1, 2, 3, 8, 9, 10, 11), None), ((4, 5, 6, 7, 12, 13, 14, 15), None)]),
        (interleaved(8), None, [((0, 2, 4, 6), 0), ((1, 3, 5, 7), 1)]),
        (interleaved(8, smt=True), None, [((0, 4, 8, 12), 0), ((2, 6, 10, 14), 1)]),
        (_GAPS, None, [((8, 11, 14, 17), 7)]),
        (machine(4, smt=True, allowed="1,2,6-7"), None, [((1, 2, 7), 0)]),  # or only a sibling
        (machine(8, numa=2, allowed="0-2,7"), None, [((0, 1, 2, 7), None)]),  # uneven nodes
    ],
)
def test_cores_and_memory_of_each_rank(
    facts: HostFacts, ppn: int | None, expected: list[tuple[Any, ...]]
) -> None:
    """A rank over several NUMA nodes has its memory where its threads are."""
    assert [(share.cpus, share.numa) for share in plan(facts, ppn=ppn).shares[0]] == expected


def test_the_smallest_node_decides_and_idle_cores_are_reported() -> None:
    placement = plan(machine(32), machine(8))

    assert placement.omp_threads == 8
    assert cpus(placement, 0) == cpus(placement, 1) == [tuple(range(8))]
    (warning,) = placement.warnings
    assert warning.startswith("node0 computes on 8 of its 32 cores")


@pytest.mark.parametrize(
    ("facts", "ppn", "workers", "message"),
    [
        (machine(2), 3, 0, "--ppn 3: node0 has 2 physical cores, too few for 3 ranks"),
        (machine(8), 2, 4, r"--ppn 2 --ccl-workers 4: node0 has 8 .* 4 oneCCL workers"),
        (machine(1), None, 1, "--ccl-workers 1: node0 has 1 physical core, too few for 1 rank of"),
        (machine(12, numa=2), 5, 0, r"\(by NUMA node: 6 and 6\) .*\n.*: 1, 2, 4, 6, 12$"),
        (machine(8, numa=2, allowed="0-2,7"), 2, 0, r"by NUMA node: 3 and 1\)"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    facts: HostFacts, ppn: int | None, workers: int, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        plan(facts, ppn=ppn, workers=workers)
    assert re.search(message, f"{refused.value.message}\n{refused.value.hint}")


def test_one_core_computes_over_gloo_and_not_beside_a_oneccl_worker() -> None:
    assert plan(machine(1)).omp_threads == 1
    assert plan(machine(4, numa=4), workers=1).omp_threads == 3, "a NUMA node has one core"
    with pytest.raises(UsageError, match=r"^--backend ccl: node0 has 1 physical core, too few"):
        plan_placement({"node0": machine(1)}, {"node0": "172.31.0.10"}, PlacementOptions(), "ccl")


def test_the_published_numbers_come_with_a_warning() -> None:
    placement = plan(R7IZ, mode="reference")
    options = PlacementOptions("reference")
    ccl = plan_placement({"node0": R7IZ}, {"node0": "172.31.0.10"}, options, "ccl")

    assert (ccl.nproc_per_node, ccl.omp_threads, ccl.ccl_workers) == (2, 24, 2)
    assert "node0 is oversubscribed: 52 busy threads on 32 cores" in ccl.warnings
    assert (placement.ccl_workers, placement.shares) == (0, ())
    assert len(plan(machine(48), mode="reference").warnings) == 1, "as many threads as cores"


def test_nodes_may_differ_in_their_interfaces() -> None:
    assert plan(machine(2), machine(2)).interface == "ens5"
    assert plan(machine(2), machine(2, interface="eth0"), machine(2)).interface == "ens5,eth0"
    with pytest.raises(
        HostError, match=r"none of its network interfaces has its address 10\.0\.0\.1"
    ):
        plan_placement({"node0": R7IZ}, {"node0": "10.0.0.1"}, PlacementOptions(), "gloo")


@st.composite
def machines(draw: st.DrawFn) -> HostFacts:
    """Any machine: CPUs numbered at will, of which some may be used."""
    sockets, nodes = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    cores, threads = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    places = [
        (core, socket, socket * nodes + node)
        for socket in range(sockets)
        for node in range(nodes)
        for core in range(node * cores, (node + 1) * cores)
        for _ in range(threads)
    ]
    numbers = draw(st.permutations(range(len(places) + 3)))
    rows = [(cpu, *place) for cpu, place in zip(numbers, places, strict=False)]
    usable = draw(st.sets(st.sampled_from([row[0] for row in rows]), min_size=1))
    return from_rows(rows, ",".join(map(str, usable)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(machines(), min_size=1, max_size=3), st.none() | st.integers(1, 8), st.integers(0, 3)
)
def test_no_placement_oversubscribes(facts: list[HostFacts], ppn: int | None, workers: int) -> None:
    try:
        ranks = plan(*facts, ppn=ppn, workers=workers)
    except UsageError:
        assert ppn or workers, "without a options there is always a placement"
        return
    for fact, shares in zip(facts, ranks.shares, strict=True):
        core_of = {cpu.cpu: (cpu.socket, cpu.core) for cpu in fact.cpus}
        taken = [core_of[cpu] for share in shares for cpu in share.cpus + share.workers]
        assert len(taken) == len(set(taken)), "no core is in two shares, nor twice in one"
        assert len(shares) == ranks.nproc_per_node
        for share in shares:
            assert len(share.cpus) == ranks.omp_threads >= 1
            assert len(share.workers) == ranks.ccl_workers == workers
            nodes = {cpu.node for cpu in fact.cpus if cpu.cpu in share.cpus + share.workers}
            assert nodes == {share.numa} or (share.numa is None and len(nodes) > 1)
        assert list(shares) == sorted(shares, key=lambda s: sum(1 << cpu for cpu in s.cpus))
