"""The measurement as on the nodes: the shipped package, one process per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.worker.training.test_run import run_ranks

pytestmark = pytest.mark.usefixtures("node_environ")


def test_two_ranks_measure_at_the_same_time(node: Path) -> None:
    first, second = run_ranks(node, [["-m", "worker.bench", '{"seconds": 0.1}']] * 2)

    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert not second.events, "only rank 0 speaks"
    names = [event["name"] for event in first.of("phase")]
    # No all-reduce: both ranks are on one machine, where no network is between them.
    assert names == ["which instructions oneDNN uses", "matrix products", "memory"]
    check_result(first.events[-1])


def check_result(result: dict[str, Any]) -> None:
    assert (result["event"], result["backend"]) == ("result", "gloo")
    assert result["all_reduce"] == []
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    with_amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    for rank in result["ranks"]:
        assert rank["threads"] == 1
        assert 0 < rank["gemm_tflops"] < 1000
        assert 0.1 < rank["memory_gb_s"] < 2000
        assert rank["memory_array_bytes"] >= 64 << 20
        # Where the processor has no AMX, nothing else may be said.
        assert rank["amx"] is False or with_amx
        assert rank["onednn"].startswith("AMX ran (" if rank["amx"] else "no AMX (")
