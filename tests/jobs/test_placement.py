from __future__ import annotations

import pytest

from infra.errors import SprError, UsageError
from jobs.placement import Placement, plan_placement
from provision.facts import HostFacts, parse_facts
from tests.fakes import facts_answer


def machine(cores: int, *, numa: int = 1, smt: bool = False, interface: str = "ens5") -> HostFacts:
    """One socket; hyper-threads get the numbers after all cores, as Linux numbers them."""
    rows = [f"{core},{core},0,{core * numa // cores}" for core in range(cores)]
    if smt:
        rows += [f"{cores + core},{core},0,{core * numa // cores}" for core in range(cores)]
    answer = facts_answer(
        topology="\n".join(rows), allowed=f"0-{len(rows) - 1}", interface=interface
    )
    return parse_facts(answer)


def plan(*facts: HostFacts, ppn: int | None = None, workers: int = 0) -> Placement:
    by_name = {f"node{rank}": fact for rank, fact in enumerate(facts)}
    addresses = dict.fromkeys(by_name, "172.31.0.10")
    return plan_placement(by_name, addresses, nproc_per_node=ppn, ccl_workers=workers)


@pytest.mark.parametrize(
    ("ppn", "workers", "threads"),
    [(1, 1, 31), (2, 1, 15), (2, 2, 14), (2, 0, 16), (1, 0, 32), (None, 1, 31)],
)
def test_the_32_cores_of_an_r7iz_metal_16xl(ppn: int | None, workers: int, threads: int) -> None:
    assert plan(machine(32, smt=True), ppn=ppn, workers=workers).omp_threads == threads


def test_a_rank_per_numa_node_unless_told_otherwise() -> None:
    two_sockets = plan(machine(64, numa=2), workers=1)

    assert (two_sockets.nproc_per_node, two_sockets.omp_threads) == (2, 31)


def test_the_smallest_node_decides() -> None:
    assert plan(machine(32), machine(8)).omp_threads == 8


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(UsageError, match="--ppn 3: node1 has 2 physical cores"):
        plan(machine(4), machine(2), ppn=3)


def test_a_node_with_one_core_still_computes() -> None:
    assert plan(machine(1), workers=1).omp_threads == 1


def test_nodes_that_differ_in_their_interface_are_named() -> None:
    with pytest.raises(SprError, match="network interface: node0: ens5, node1: eth0"):
        plan(machine(2), machine(2, interface="eth0"))
