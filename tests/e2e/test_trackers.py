"""``train --report-to`` with a real MLflow server in the first node's network, and TensorBoard's reader."""

from __future__ import annotations

import json
import secrets
import shlex
from pathlib import Path

import pytest

from tests.e2e.conftest import TWO, LiveCluster, ssh_two
from tests.jobs.worker.runtime.mlflow_server import as_dict, running, server_argv
from tests.jobs.worker.runtime.test_trackers import read_scalars

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PORT = 5017


def test_a_job_reports_to_mlflow_and_tensorboard(
    two: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, server = tmp_path / "results", tmp_path / "server"
    server.mkdir()
    token = secrets.token_hex(16)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    command = ("train", "digits", *TWO, "--report-to=mlflow,tensorboard", f"--results={results}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    refused = two.cli.run(*command, check=2)
    assert "--report-to mlflow needs MLFLOW_TRACKING_URI" in refused.stderr
    address = f"http://127.0.0.1:{PORT}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)

    with running([*two.network_argv("node0"), *server_argv(server, PORT)], server):
        wait = f"curl --silent --fail {address}/health && break; sleep 0.2"
        ssh_two(two, "node0", f"for i in $(seq 300); do {wait}; done")
        done = two.cli.run(*command)
        job = json.loads((results / "job.json").read_text())
        wanted = {"experiment_ids": ["0"], "filter": f"tags.`spr-cluster.job` = '{job['job']}'"}
        ask = [
            "curl",
            "--silent",
            f"--json={json.dumps(wanted)}",
            f"{address}/api/2.0/mlflow/runs/search",
        ]
        found = json.loads(ssh_two(two, "node0", shlex.join(ask)))

    assert "mlflow-skinny==" in done.stderr
    assert "gets no more metrics" not in done.stderr
    (run,) = found["runs"]
    final = json.loads((results / "results.json").read_text())
    metrics, params = as_dict(run["data"]["metrics"]), as_dict(run["data"]["params"])
    assert run["info"]["status"] == "FINISHED"
    assert (params["ranks"], params["epochs"]) == ("2", str(final["epochs"]))
    assert metrics["eval/accuracy"] == final["accuracy"]
    assert metrics["train/loss"] > 0
    scalars = read_scalars(results / "tensorboard")
    assert scalars["eval/accuracy"][-1][1] == pytest.approx(final["accuracy"])
    assert scalars["train/loss"][-1][1] == pytest.approx(metrics["train/loss"])
    assert {"MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"} == {*job["more"]["env"]}
    kept = [path for path in results.rglob("*") if path.is_file()]
    assert not [path for path in kept if token.encode() in path.read_bytes()]
    assert token not in done.stdout + done.stderr
