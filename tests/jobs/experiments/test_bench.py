"""`bench` from the cluster to the result on its head, with SSH faked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.errors import JobError
from jobs.experiments.bench import BenchRequest, BenchResult, bench, read_last_speeds
from jobs.places.plan import JobPaths, new_job_id
from tests.fakes import FakeHost
from tests.jobs.context import NOW, event, job_context, make_hosts, mpirun_line, whole_cluster

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


def result(*ranks: dict[str, Any], dtype: str = "bf16") -> str:
    return event(
        event="result",
        backend="gloo",
        dtype=dtype,
        dtype_reason="every CPU has amx_bf16",
        matrix_size=4096,
        ranks=list(ranks),
        all_reduce=[{"bytes": 4096, "seconds": 1e-3, "repeats": 9, "bus_gb_s": 0.005}],
        torch="2.13.0",
    )


def run(
    hosts: dict[str, FakeHost], log: list[str] | None = None, *, real: bool = True
) -> tuple[BenchResult, FakeHost]:
    head = hosts["node0"]
    head.answers.append(("mkdir -p ~/spr-bench", ""))
    request = BenchRequest(3.0, amx_expected=True, real=real)
    speeds = bench(job_context(hosts, log=log), request)
    return speeds, head


def test_the_figures_of_every_node_are_kept_on_the_head() -> None:
    # mpirun merges outputs as they come; the ranks say who they are.
    speeds, head = run(make_hosts([result(rank(2, 20.0), rank(0), rank(1))]))

    assert [node.name for node in speeds.nodes] == ["node0", "node1", "node2"]
    assert [node.gemm_tflops for node in speeds.nodes] == [30, 30, 20]
    assert [slow.node for slow in speeds.slow_nodes] == ["node2"]
    assert json.loads(head.files[KEPT]) == json.loads(json.dumps(speeds.as_dict()))


def test_the_ranks_are_placed_like_a_training_jobs() -> None:
    _, head = run(make_hosts([result(rank(0), rank(1), rank(2))]))

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


@pytest.mark.parametrize("text", ["{", '{"nodes": 3}'])
def test_a_broken_saved_file_is_reported(text: str) -> None:
    with pytest.raises(JobError, match="can't be read"):
        read_last_speeds(FakeHost("node0", [("cat", text)]), whole_cluster())
