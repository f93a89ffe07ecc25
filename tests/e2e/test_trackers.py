"""A task without data, which reports to a real MLflow server on this machine and to TensorBoard files."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import TWO, LiveCluster, ssh_two
from tests.jobs.worker.runtime.mlflow_server import (
    as_dict,
    ask,
    running,
    server_argv,
    wait_until_ready,
)
from tests.jobs.worker.runtime.test_trackers import read_scalars
from tests.jobs.worker.training.test_run import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PORT = 5017
"""The server's port on the node."""


@contextmanager
def passing_port(cluster: LiveCluster, port: int) -> Iterator[None]:
    """Let the first node reach a port of this machine's loopback."""
    config = str(cluster.cli.home / TWO[1] / "ssh_config")
    forward = ["-o", "ExitOnForwardFailure=yes", "-R", f"{PORT}:127.0.0.1:{port}"]
    with subprocess.Popen(["ssh", "-F", config, "-N", *forward, "node0"]) as ssh:
        try:
            health = f"curl --silent --fail http://localhost:{PORT}/health && break; sleep 0.2"
            ssh_two(cluster, "node0", f"for i in $(seq 150); do {health}; done")
            yield
        finally:
            ssh.terminate()


def test_a_job_reports_to_mlflow_and_tensorboard_and_has_records_report_and_fetch(
    two: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, server, port = tmp_path / "results", tmp_path / "server", free_port()
    server.mkdir()
    token = secrets.token_hex(16)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    more = ("--report-to=mlflow,tensorboard", f"--results={results}")
    command = ("train", "digits", *TWO, *more)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    refused = two.cli.run(*command, check=2)
    assert "--report-to mlflow needs MLFLOW_TRACKING_URI" in refused.stderr
    assert not results.exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://localhost:{PORT}")

    with running(server_argv(server, port), server):
        wait_until_ready(port)
        with passing_port(two, port):
            done = two.cli.run(*command)
        record = json.loads((results / "job/job.json").read_text())
        wanted = f"tags.`spr-cluster.job` = '{record['job']}'"
        found = ask(port, "runs/search", experiment_ids=["0"], filter=wanted)

    assert "resolving the packages of --report-to mlflow,tensorboard" in done.stderr
    assert " packages: absl-py==" in done.stderr, "they are not in the stack"
    assert "gets no more metrics" not in done.stderr
    (run,) = found["runs"]
    final = json.loads((results / "results.json").read_text())
    metrics, params = as_dict(run["data"]["metrics"]), as_dict(run["data"]["params"])
    assert run["info"]["status"] == "FINISHED"
    assert (params["ranks"], params["epochs"]) == ("2", "8")
    assert metrics["eval/accuracy"] == final["accuracy"]
    scalars = read_scalars(results / "tensorboard")
    assert scalars["eval/accuracy"][-1][1] == pytest.approx(final["accuracy"])
    assert scalars["train/loss"][-1][1] == pytest.approx(metrics["train/loss"])
    assert record["more"]["env"] == ["MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"]
    kept = [path for path in results.rglob("*") if path.is_file()]
    assert not [path for path in kept if token.encode() in path.read_bytes()]
    assert token not in done.stdout + done.stderr

    assert final["accuracy"] > 90
    assert final["world_size"] == 2
    assert all(rank["planned"]["cpus"] == rank["found"]["cpus"] for rank in final["ranks"])
    assert (record["kind"], record["exit_code"], len(record["nodes"])) == ("digits", 0, 2)
    assert record["placement"]["shares"]
    assert len(list(results.glob("job/metrics/rank-*.jsonl"))) == 2
    two.cli.run("report", str(results))
    assert record["job"] in (results / "report.html").read_text()
    two.cli.run("fetch", record["job"], *TWO, "--results", str(tmp_path / "again"))
    assert json.loads((tmp_path / "again/results.json").read_text()) == final
