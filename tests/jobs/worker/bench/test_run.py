"""The measurement as on the nodes: the shipped package, one process per rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs.worker.runtime.events import parse_event
from tests.harness.forked import Forked
from tests.jobs.worker.training.test_run import free_port

TIMEOUT = 120


def run_ranks(folder: Path, environ: dict[str, str], ranks: int) -> list[tuple[int, str]]:
    port, python = free_port(), [sys.executable, "-m", "worker.bench", '{"seconds": 0.1}']
    environ = environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ["GLOO_SOCKET_IFNAME"] = "lo"
    environ |= {"OMP_NUM_THREADS": "1", "PMI_SIZE": str(ranks)}
    running = [
        Forked(
            python,
            cwd=folder,
            env={**environ, "PMI_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]


def test_two_ranks_measure_at_the_same_time(node: Path, node_environ: dict[str, str]) -> None:
    (code, output), (second_code, second) = run_ranks(node, node_environ, 2)

    assert (code, second_code) == (0, 0), output + second
    assert "@spr" not in second, "only rank 0 speaks"
    events = [event for event in map(parse_event, output.splitlines()) if event]
    names = [event["name"] for event in events if event["event"] == "phase"]
    # No all-reduce: both ranks are on one machine, where no network is between them.
    assert names == ["which instructions oneDNN uses", "matrix products", "memory"]
    check_result(events[-1])


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
