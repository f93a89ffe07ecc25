"""`bench` and `tune` as commands: output, saved results, exit codes. The nodes' answers are staged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from provision.host import Result
from tests.harness.command_line import CommandLine
from tests.jobs.context import ended, event

AMX = "AMX ran (brg_matmul:avx10_1_512_amx)"
NONE = "no AMX (Intel AVX2; oneDNN ran nothing in bf16)"


@pytest.fixture
def line(two: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """The same, with nothing staged but what every job needs."""
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(two.cloud.ctx.files.folder.parent))
    monkeypatch.chdir(tmp_path)
    two.machines.staged.clear()
    for pattern in ("# distributing", "# submitting", "mkdir -p ~/spr-bench"):
        two.stage("node0", pattern, Result(0, "", ""))
    two.stage("node0", r"cat \S*/end.json", Result(0, ended(), ""))
    return two


def figures(*onednn: str, gemm: tuple[float, ...] = (100.0, 100.0), dtype: str = "bf16") -> str:
    ranks = [
        {
            "rank": rank,
            "hostname": f"host{rank}",
            "threads": 32,
            "gemm_tflops": speed,
            "memory_gb_s": 200.0,
            "amx": said.startswith("AMX"),
            "onednn": said,
        }
        for rank, (said, speed) in enumerate(zip(onednn, gemm, strict=True))
    ]
    return event(
        event="result",
        backend="ccl",
        dtype=dtype,
        dtype_reason="as this processor suits",
        matrix_size=8192,
        ranks=ranks,
        all_reduce=[
            {"bytes": 4096, "seconds": 2e-5, "repeats": 9, "bus_gb_s": 0.2},
            {"bytes": 64 << 20, "seconds": 0.03, "repeats": 9, "bus_gb_s": 2.237},
        ],
        torch="2.7.0",
    )


def measured(line: CommandLine, text: str) -> None:
    line.stage("node0", "# following a job", Result(0, text, ""))


def test_the_table_has_a_row_for_each_node(line: CommandLine) -> None:
    measured(line, figures(AMX, AMX))

    result = line.must("bench")

    rows = [row.split("  ") for row in result.out.splitlines() if row.startswith("node")]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert cells[0] == ["node", "type", "threads", "bf16", "of peak", "memory", "oneDNN"]
    same = ["r7iz.metal-16xl", "32", "100 TFLOPS", "78%", "200.0 GB/s", AMX]
    assert cells[1:] == [["node0", *same], ["node1", *same]]
    assert "r7iz.metal-16xl 127.8 TFLOPS (32 cores at 3.9 GHz" in result.out
    assert re.search(r"4 KiB +0\.02 ms +0\.200 GB/s\n +64 MiB +30\.00 ms +2\.237 GB/s", result.out)
    assert "SLOW" not in result.out


def test_missing_amx_is_a_failure_if_expected(line: CommandLine) -> None:
    measured(line, figures(AMX, NONE))

    result = line.run("bench")

    assert result.code == 1
    assert f"1 of 2 nodes did not use AMX, which this cluster requires: node1: {NONE}" in result.err
    # The figures are printed all the same.
    assert NONE in result.out


def test_json_is_alone_on_stdout_also_for_a_failure(line: CommandLine) -> None:
    measured(line, figures(NONE, NONE, dtype="fp32"))

    outcome = line.run("bench", "--json")

    assert outcome.code == 1
    result = json.loads(outcome.out)
    assert result["amx"] is False
    assert [node["peak_tflops"] for node in result["nodes"]] == [None, None]


def test_a_slow_node_is_named_with_its_remedy_and_is_no_failure(line: CommandLine) -> None:
    measured(line, figures(AMX, AMX, gemm=(100.0, 60.0)))

    result = line.must("bench")

    assert "SLOW: node1 reaches 60% of the other node's figure in matrix products" in result.out
    (remedy,) = [row for row in result.out.splitlines() if row.startswith("  → ")]
    instance = re.search(r"--instance-ids (i-\w+), then spr-cluster repair --name spr;", remedy)
    assert instance
    assert instance[1] in line.ids()


def test_the_last_measurement_is_shown_again(line: CommandLine) -> None:
    measured(line, figures(AMX, AMX))
    first = json.loads(line.must("bench", "--json").out)
    line.stage("node0", "ls -1 ~/spr-bench", Result(0, json.dumps(first), ""))

    assert json.loads(line.must("bench", "--last", "--json").out) == first
    assert AMX in line.must("bench", "--last").out


def test_the_last_measurement_of_a_cluster_that_has_none(line: CommandLine) -> None:
    line.stage("node0", "ls -1 ~/spr-bench", Result(0, "", ""))

    result = line.run("bench", "--last")

    assert result.code == 2
    assert result.message == (
        "cluster 'spr' has not been measured yet\n  → run `spr-cluster bench --name spr`"
    )


def speeds_by_ppn(line: CommandLine, speeds: dict[int, float]) -> None:
    """What the trials measure, by the ranks per node in the head's own script."""

    def follow(on_text: Any) -> Result:
        machines = line.cloud.machines
        (script,) = machines.root.glob("i-*/launch.json.*")
        found = re.search(r'"nproc_per_node": (\d)', script.read_text())
        assert found
        value = speeds[int(found[1])]
        on_text(
            event(event="trial", samples_per_second=value, steps=5, seconds=2, gradient_bytes=1000)
        )
        return Result(0, "", "")

    line.stage("node0", "# following a job", follow)
    line.stage("node0", "spr-cluster-tuned", Result(0, "", ""))


def tune(*more: str) -> tuple[str, ...]:
    return ("tune", "squad", "--demo", "--seconds=2", "--backend=gloo", *more)


def test_tune_shows_its_plan_trials_and_result(line: CommandLine) -> None:
    speeds_by_ppn(line, {1: 10.0, 2: 12.5})

    result = line.must(*tune())

    # Two cores: one rank or two.
    assert "2 trials of 2 s each: about 1 min 04 s including start-up" in result.err
    rows = [row.split() for row in result.out.splitlines()]
    assert rows[0] == ["ppn", "workers", "threads", "batch", "samples/s"]
    assert rows[1:3] == [["2", "-", "1", "8", "12.5"], ["1", "-", "2", "8", "10.0"]]
    assert "Kept on the head for scratch on stack upstream: --ppn 2." in result.out
    assert "Trials compile no layers, except with --compile on" in result.out


def test_tune_shows_failed_trials_in_their_rows(line: CommandLine) -> None:
    speeds_by_ppn(line, {1: 10.0})

    outcome = line.must(*tune("--ppn", "1,3", "--json"))

    result = json.loads(outcome.out)
    assert result["best"]["nproc_per_node"] == 1
    assert [bool(trial["failure"]) for trial in result["trials"]] == [False, True]
    table = line.must(*tune("--ppn", "1,3")).out
    assert re.search(r"^3 +- +- +8 +failed: --ppn 3: node0 has 2 physical cores", table, re.M)


def test_a_single_trial_suggests_more(line: CommandLine) -> None:
    speeds_by_ppn(line, {1: 10.0})
    result = line.must(*tune("--ppn", "1"))
    assert "Only one trial ran; --ppn 1,2 compares two." in result.out


def test_without_a_cluster_both_name_up(line: CommandLine) -> None:
    for argv in (("bench", "--name", "none"), (*tune(), "--name", "none")):
        result = line.run(*argv)
        assert result.code == 2
        assert result.message.startswith("no cluster 'none' is running in us-east-1")
