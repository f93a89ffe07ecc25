"""`bench` from the cluster to the result on its head, with SSH faked; its conclusions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.errors import JobError
from infra.instance_types import INSTANCE_TYPES
from jobs.experiments.bench import (
    BenchRequest,
    BenchResult,
    NodeSpeed,
    SlowNode,
    bench,
    find_peak,
    find_slow,
)
from jobs.places.plan import JobPaths, new_job_id
from tests.fakes import FakeHost
from tests.jobs.context import NOW, event, job_context, make_hosts, mpirun_line

PATHS = JobPaths(new_job_id("bench", NOW))
KEPT = "/home/ubuntu/spr-bench/20260731-142501.json"
AMX = "AMX ran (brg_matmul:avx10_1_512_amx)"


def rank(number: int, gemm: float = 30.0, onednn: str = AMX) -> dict[str, Any]:
    return {
        "rank": number,
        "hostname": f"host{number}",
        "threads": 2,
        "gemm_tflops": gemm,
        "memory_gb_s": 100.0,
        "amx": onednn.startswith("AMX"),
        "onednn": onednn,
    }


def result(*ranks: dict[str, Any]) -> str:
    return event(
        event="result",
        backend="gloo",
        dtype="bf16",
        dtype_reason="every CPU has amx_bf16",
        matrix_size=4096,
        ranks=list(ranks),
        all_reduce=[{"bytes": 4096, "seconds": 1e-3, "repeats": 9, "bus_gb_s": 0.005}],
        torch="2.13.0",
    )


def run(hosts: dict[str, FakeHost], *, real: bool = True) -> tuple[BenchResult, FakeHost]:
    head = hosts["node0"]
    head.answers.append(("mkdir -p ~/spr-bench", ""))
    request = BenchRequest(3.0, amx_expected=True, real=real)
    speeds = bench(job_context(hosts), request, lambda _: None)
    return speeds, head


def test_the_figures_of_every_node_are_kept_on_the_head() -> None:
    # mpirun merges outputs as they come; the ranks say who they are.
    speeds, head = run(make_hosts([result(rank(2, 20.0), rank(0), rank(1))]))

    assert [node.name for node in speeds.nodes] == ["node0", "node1", "node2"]
    assert [node.gemm_tflops for node in speeds.nodes] == [30, 30, 20]
    assert [slow.node for slow in speeds.slow_nodes] == ["node2"]
    assert json.loads(head.files[KEPT]) == json.loads(json.dumps(speeds.as_dict()))
    script = mpirun_line(head, PATHS)
    assert f"-ppn 1 -wdir {PATHS.root} -n 3 " in script
    assert """-m worker.bench '{"backend": "gloo", "seconds": 3.0}'""" in script
    assert "-genv SPR_PLACEMENT" in script


def test_a_node_sums_its_ranks_and_has_amx_only_if_all_do() -> None:
    ranks = [rank(0), rank(1, onednn="no AMX (Intel AVX2)"), *(rank(n) for n in range(2, 6))]
    speeds, _ = run(make_hosts([result(*ranks)]), real=False)

    first = speeds.nodes[0]
    assert first.peak_tflops is None, "the embedded cloud's machines only have the type's name"
    assert (first.gemm_tflops, first.memory_gb_s, first.threads) == (60, 200, 4)
    assert (first.amx, first.onednn) == (False, "no AMX (Intel AVX2)")
    assert [node.name for node in speeds.without_amx] == ["node0"]
    assert (len(speeds.nodes), speeds.as_dict()["amx"]) == (3, False)


def test_a_failed_measurement_is_reported_and_not_kept() -> None:
    failed = event(event="error", message="no libmpi", hint=None, rank=1, host="b", lost_peer=False)
    hosts = make_hosts([failed], exit_code=1)

    with pytest.raises(JobError, match="rank 1 on b: no libmpi") as caught:
        run(hosts)
    assert caught.value.hint == f"the whole log is {PATHS.log} on node0"
    assert KEPT not in hosts["node0"].files


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("r7iz.metal-16xl", 127.8),  # 32 cores x 1024 x 3.9 GHz
        ("c7i.metal-24xl", 157.3),  # 48 x 1024 x 3.2
        ("m8i.metal-96xl", 766.8),
        ("m7i.16xlarge", None),  # a part of a processor
        ("c6i.16xlarge", None),  # no AMX
        ("x99.metal", None),
    ],
)
def test_only_bf16_on_a_whole_machine_has_a_peak(name: str, peak: float | None) -> None:
    found = find_peak(name, dtype="bf16", real=True)
    assert found == (peak and pytest.approx(peak, abs=0.05))
    assert find_peak(name, dtype="fp32", real=True) is None


def test_every_whole_machine_with_amx_has_a_peak() -> None:
    metal = [entry for entry in INSTANCE_TYPES.values() if ".metal-" in entry.name and entry.amx]
    assert len(metal) >= 14
    assert all(entry.peak_bf16_tflops for entry in metal)


def node(number: int, gemm: float, memory: float = 200.0) -> NodeSpeed:
    return NodeSpeed(
        f"node{number}", "i-1", "r7iz.metal-16xl", "a", 32, gemm, 127.8, memory, True, AMX
    )


def test_a_node_below_nine_tenths_of_the_median_is_slow() -> None:
    def slow(*gemm: float) -> dict[str, float]:
        found = find_slow([node(*each) for each in enumerate(gemm)])
        assert {each.what for each in found} <= {"matrix products"}
        return {each.node: round(each.share, 6) for each in found}

    assert slow(100, 91, 100, 100) == slow(100) == slow(100, 100, 100, 300) == {}
    assert slow(100, 89, 100, 100) == {"node1": 0.89}
    # Half of the nodes slow: the median is between, and the slow half is still named.
    assert slow(100, 100, 60, 60) == {"node2": 0.75, "node3": 0.75}
    assert slow(100, 89) == {"node1": 0.89}, "of two, the faster one is the measure"


def test_slow_memory_is_named_as_such() -> None:
    nodes = [node(0, 100), node(1, 100), node(2, 100, memory=100)]
    assert find_slow(nodes) == (SlowNode("node2", "memory", 0.5),)
    assert nodes[0].peak_share == pytest.approx(100 / 127.8)
