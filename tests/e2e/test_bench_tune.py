"""Real figures of real nodes, and the faster of real trials; the next job uses it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TWO, LiveCluster, ssh_two
from tests.jobs.worker.runtime.test_trackers import read_scalars

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAME = TWO[1]
KEPT = "/home/ubuntu/.spr-cluster-tuned.json"
STUDY = ("train", "digits", "--name", NAME)


@pytest.fixture(scope="module", autouse=True)
def _forget(two: LiveCluster) -> Iterator[None]:
    """What a study finds is for these tests only."""
    yield
    ssh_two(two, "node0", f"rm -f {KEPT}")


@pytest.fixture(scope="module")
def measured(two: LiveCluster) -> Any:
    """What `bench --json` says."""
    return two.cli.json("bench", "--name", NAME, "--seconds", "1")


def test_bench_has_figures_of_every_node_and_of_the_network(measured: Any) -> None:
    assert [node["name"] for node in measured["nodes"]] == ["node0", "node1"]
    assert len({node["hostname"] for node in measured["nodes"]}) == 2
    for node in measured["nodes"]:
        assert 0.001 < node["gemm_tflops"] < 1000
        assert 0.1 < node["memory_gb_s"] < 2000
        # The name says r7iz, but these are containers on this machine.
        assert node["peak_tflops"] is node["peak_share"] is None
    sizes = [done["bytes"] for done in measured["all_reduce"]]
    assert sizes == [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
    assert all(0 < done["bus_gb_s"] < 1000 for done in measured["all_reduce"])


def test_bench_reports_the_instructions_that_onednn_ran(two: LiveCluster, measured: Any) -> None:
    verdict = "AMX ran (" if measured["amx"] else "no AMX ("
    assert not measured["amx"] or "amx_bf16" in Path("/proc/cpuinfo").read_text()
    for node in measured["nodes"]:
        assert node["onednn"].startswith(verdict)
        # oneDNN's name for its code, not merely silence.
        assert re.search("AVX|SSE|AMX", node["onednn"].removeprefix(verdict), re.IGNORECASE)
    # AMX is not expected of a container, so its absence is no failure.
    shown = two.cli.run("bench", "--name", NAME, "--last").stdout
    assert len(re.findall(rf"^node[01] .* {re.escape(verdict)}", shown, re.MULTILINE)) == 2
    assert not re.search(r"\bok\b", shown, re.IGNORECASE)


def test_bench_keeps_its_figures_with_the_cluster(two: LiveCluster, measured: Any) -> None:
    assert two.cli.json("bench", "--name", NAME, "--last") == measured
    (file,) = ssh_two(two, "node0", "ls spr-bench").split()
    assert json.loads(ssh_two(two, "node0", f"cat spr-bench/{file}")) == measured


def test_the_faster_trial_is_kept_and_the_next_job_uses_it_and_reports_to_tensorboard(
    two: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    refused = two.cli.run(*STUDY, "--report-to=mlflow", check=2)
    assert "--report-to mlflow needs MLFLOW_TRACKING_URI" in refused.stderr
    # A batch of two leaves the processor waiting for all that a step does besides.
    found = two.cli.json(*STUDY, "--tune=ppn=1,batch-size=2,16", "--max-steps=20")

    speeds = {trial["batch_size"]: trial["samples_per_second"] for trial in found["trials"]}
    assert set(speeds) == {2, 16}
    assert all(speeds.values())
    best, kept = found["best"]["batch_size"], found["kept"]
    assert best == kept["batch_size"] == max(speeds, key=lambda size: speeds[size])
    assert kept["samples_per_second"] == max(speeds.values())

    results = tmp_path / "results"
    done = two.cli.run(*STUDY, "--epochs=1", "--report-to=tensorboard", f"--results={results}")

    wanted = f"--ppn 1 --batch-size {best} (a global batch of {2 * best} samples)"
    assert f"{wanted} from `--tune placement` of {kept['when'][:10]}" in done.stderr
    assert " packages: absl-py==" in done.stderr, "they are not in the stack"
    final = json.loads((results / "results.json").read_text())
    assert (final["batch_size_per_rank"], final["world_size"]) == (best, 2)
    scalars = read_scalars(results / "tensorboard")
    assert scalars["eval/accuracy"][-1][1] == pytest.approx(final["accuracy"])
    assert all(rank["planned"]["cpus"] == rank["found"]["cpus"] for rank in final["ranks"])
    record = json.loads((results / "job/job.json").read_text())
    assert (record["kind"], record["exit_code"], len(record["nodes"])) == ("digits", 0, 2)
    assert len(list(results.glob("job/metrics/rank-*.jsonl"))) == 2
    two.cli.run("report", str(results))
    assert record["job"] in (results / "report.html").read_text()
    two.cli.run("fetch", record["job"], *TWO, "--results", str(tmp_path / "again"))
    assert json.loads((tmp_path / "again/results.json").read_text()) == final
