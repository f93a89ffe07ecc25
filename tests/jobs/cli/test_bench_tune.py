"""`bench` and studies of the speed as commands: output, saved results, exit codes; nodes are staged."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infra.errors import ConnectionLostError
from jobs.cli import invoke
from jobs.worker.spec import Ending
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
    measured(line, figures(AMX, NONE, dtype="fp32"))
    result, outcome = line.run("bench"), line.run("bench", "--json")

    assert result.code == outcome.code == 1
    assert f"1 of 2 nodes did not use AMX, which this cluster requires: node1: {NONE}" in result.err
    # The figures are printed all the same.
    assert NONE in result.out
    found = json.loads(outcome.out)
    assert found["amx"] is False
    assert [node["peak_tflops"] for node in found["nodes"]] == [None, None]
    assert [node["peak_share"] for node in found["nodes"]] == [None, None]


def test_a_slow_node_is_named_with_its_remedy_and_is_no_failure(line: CommandLine) -> None:
    measured(line, figures(AMX, AMX, gemm=(100.0, 60.0)))

    result = line.must("bench")

    assert "SLOW: node1 reaches 60% of the other node's figure in matrix products" in result.out
    (remedy,) = [row for row in result.out.splitlines() if row.startswith("  → ")]
    instance = re.search(r"--instance-ids (i-\w+), then spr-cluster repair --name spr;", remedy)
    assert instance
    assert instance[1] in line.ids()


def test_figures_that_the_head_can_t_keep_are_shown_all_the_same(line: CommandLine) -> None:
    lost = ConnectionLostError("node0", "the connection broke")
    measured(line, figures(AMX, AMX))
    line.machines.staged.insert(0, ("node0", "^mkdir -p ~/spr-bench", Mock(side_effect=lost)))

    result = line.run("bench", "--json")

    assert (result.code, json.loads(result.out)["amx"]) == (1, True)
    assert "the connection broke" in result.err


def test_the_last_measurement_is_shown_again(line: CommandLine) -> None:
    measured(line, figures(AMX, AMX))
    first = json.loads(line.must("bench", "--json").out)
    line.stage("node0", "ls -1 ~/spr-bench", Result(0, json.dumps(first), ""))

    assert json.loads(line.must("bench", "--last", "--json").out) == first
    assert AMX in line.must("bench", "--last").out
    line.machines.staged.insert(0, ("node0", "ls -1 ~/spr-bench", lambda _: Result(0, "{", "")))
    result = line.run("bench", "--last")
    assert result.code == 1
    assert result.message.startswith("the measurement on node0 can't be read: ")
    line.machines.staged.insert(0, ("node0", "ls -1 ~/spr-bench", lambda _: Result(0, "", "")))
    result = line.run("bench", "--last")
    assert result.code == 2
    assert result.message == (
        "cluster 'spr' has not been measured yet\n  → run `spr-cluster bench --name spr`"
    )


def speeds_of(line: CommandLine, speeds: dict[str, float]) -> None:
    """What the trials measure, by nodes and ranks per node in the head's own script."""

    def follow(on_text: Any) -> Result:
        (folder,) = line.cloud.machines.root.glob("i-*/launch.json.*")
        (script,) = folder.parent.glob("run.sh.*")
        nodes = re.search(r"--nodes=(\d)", script.read_text())
        ppn = re.search(r'"nproc_per_node": (\d)', folder.read_text())
        assert nodes
        assert ppn
        value = speeds[f"{nodes[1]}x{ppn[1]}"]
        on_text(event(event="trial", samples_per_second=value, steps=5, seconds=2))
        return Result(0, "", "")

    line.stage("node0", "# following a job", follow)
    line.stage("node0", "spr-cluster-tuned", Result(0, "", ""))


def study(*more: str) -> tuple[str, ...]:
    return ("train", "squad", "--demo", "--backend=gloo", *more)


def test_a_study_of_the_placement_shows_its_plan_trials_and_result(line: CommandLine) -> None:
    speeds_of(line, {"2x1": 10.0, "2x2": 12.5})

    result = line.must(*study("--tune", "placement"))

    # Two cores: one rank or two.
    assert "2 trials of 20 s each: about 2 min with start-up" in result.err
    rows = [re.split("  +", row) for row in result.out.splitlines()]
    assert rows[0] == [
        *("nodes", "ppn", "workers", "threads", "batch", "samples/s", "step", "of ideal"),
        "$ per million",
    ]
    # r7iz.metal-16xl at 6.5980 US dollars an hour, with disk and address.
    assert rows[1:3] == [
        ["2", "2", "-", "1", "8", "12.5", "400 ms", "100%", "293.25"],
        ["2", "1", "-", "2", "8", "10.0", "400 ms", "80%", "366.56"],
    ]
    assert "Kept on the head for scratch on stack upstream: --ppn 2." in result.out
    assert "Of ideal" not in result.out


def test_a_study_shows_failed_trials_in_their_rows(line: CommandLine) -> None:
    speeds_of(line, {"2x1": 10.0})

    result = json.loads(line.must(*study("--tune", "ppn=1,3", "--json")).out)

    assert result["best"] == {"nodes": 2, "nproc_per_node": 1, "ccl_workers": 0, "batch_size": 8}
    assert result["kept"]["nproc_per_node"] == 1
    assert [bool(trial["failure"]) for trial in result["trials"]] == [False, True]
    assert [trial["efficiency"] for trial in result["trials"]] == [1.0, None]
    table = line.must(*study("--tune", "ppn=1,3")).out
    assert re.search(r"^2 +3 +- +- +8 +failed: --ppn 3: node0 has 2 physical cores", table, re.M)


def test_a_study_of_nodes_keeps_nothing(line: CommandLine) -> None:
    speeds_of(line, {"1x1": 10.0, "2x1": 15.0})
    # What the job itself does at its end, and after a loss, is not for its trials.
    Path("spr-cluster.toml").write_text(
        '[jobs.mine]\ntask = "squad"\ndemo = true\nbackend = "gloo"\ndetach = true\nelastic = 1\n'
        'on-finish = "touch x"\ndown-when-done = true\nbucket = "s3://my-data/x"\n'
        'push-to = "hub:me/x"\n'
    )
    out = line.must("scaling", "mine").out
    (folder,) = line.cloud.machines.root.glob("i-*/launch.json.*")
    spec = json.loads(folder.read_text())["spec"]
    assert (spec["ending"], spec["storage"]["bucket"]) == (asdict(Ending()), None)

    assert re.search("^2 .* 15.0 .* 75%", out, re.M)
    assert "the speed per node, relative to the best one on the fewest nodes" in out
    assert "Kept" not in out


def test_a_study_needs_something_to_vary(line: CommandLine) -> None:
    result = line.run("study", "squad", "--demo")
    assert (result.code, result.message.splitlines()[0]) == (2, "a study needs --tune NAME=VALUES")
    assert result.message.endswith("spr-cluster study squad --help")
    assert "no job on the head" in line.run("study", "squad", "--resume", "squad-9").message
    assert "did you mean study?" in line.run("studdy", "squad").message


@pytest.mark.parametrize(
    ("words", "tune", "given"),
    [
        ("tune classify", ("placement",), {}),
        ("tune mine --tune batch-size=4", ("batch-size=4", "placement"), {"epochs": 3}),
        ("scaling mine --nodes 2", ("nodes",), {"epochs": 3}),
        ("scaling --seed 1 mine", ("nodes",), {"epochs": 3, "seed": 1}),
        ("study studied", ("epochs=1,2", "lr-schedule=linear,cosine"), {}),
        ("tune studied", ("epochs=1,2", "lr-schedule=linear,cosine", "placement"), {}),
    ],
)
def test_short_forms_of_a_study(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    tune: tuple[str, ...],
    given: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spr-cluster.toml").write_text(
        '[jobs.mine]\ntask = "classify"\nepochs = 3\n[jobs.studied]\ntask = "classify"\n'
        'tune = ["epochs=1,2", "lr-schedule=linear,cosine"]\n'
    )
    seen = list[Any]()
    monkeypatch.setattr("jobs.cli.train.run", seen.append)

    invoke(words.split())

    assert (seen[0].task, seen[0].tune, dict(seen[0].given)) == ("classify", tune, given)
