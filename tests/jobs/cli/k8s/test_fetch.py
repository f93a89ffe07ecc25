"""`k8s fetch`: a job's files from its claim, over a real web socket."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.cli.k8s.test_logs import (
    RESULT,
    beside,
    exit_with,
    finished,
    stamped,
    wait_for,
)
from tests.jobs.cli.test_main import run
from tests.jobs.kubernetes.scenes import (
    IMAGE,
    JOB,
)
from tests.jobs.kubernetes.server import KubernetesServer, status

FETCH = ("k8s", "fetch", "bert")


@pytest.fixture
def volume(server: KubernetesServer, tmp_path: Path) -> Path:
    """The claim with the files of a job that has succeeded, and a cluster that starts pods."""
    finished(server, stamped(["the log"]))
    server.volume = tmp_path / "volume"
    output = server.volume / "jobs" / "bert" / "output"
    for name in ("model", "metrics", "checkpoints/step-1"):
        (output / name).mkdir(parents=True)
    (output / "results.json").write_text(json.dumps(RESULT))
    (output / "model" / "weights").write_bytes(random.Random(1).randbytes(3_000_000))
    (output / "metrics" / "rank-0.jsonl").write_text("")
    (output / "checkpoints" / "step-1" / "state").write_text("large")

    def start(path: str, found: dict[str, Any]) -> None:
        server.objects[path]["status"] = {"phase": "Running"}

    server.on_create = start
    return output


def readers(server: KubernetesServer) -> list[str]:
    return [path for path in server.objects if "-reader-" in path]


def test_fetch_brings_what_bare_metal_brings(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, volume: Path
) -> None:
    created: list[dict[str, Any]] = []
    start = server.on_create

    def start_and_keep(path: str, found: dict[str, Any]) -> None:
        start(path, found)
        created.append(found)

    server.on_create = start_and_keep
    result = run(capsys, *FETCH)

    assert result.code == 0, result.err
    assert result.out == "bert (succeeded): results/bert/\n  spr-cluster report results/bert\n"
    found = Path("results", "bert")
    assert (found / "model" / "weights").read_bytes() == (volume / "model" / "weights").read_bytes()
    names = {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()}
    assert names == {"results.json", "model/weights", "metrics/rank-0.jsonl", "log", "job.json"}
    assert (found / "log").read_text() == "the log\n"
    assert run(capsys, "report", "bert").code == 0
    assert readers(server) == []
    spec = created[0]["spec"]
    assert spec["containers"][0]["image"] == "ghcr.io/me/spr:1"
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "spr-cluster"}


def test_a_download_that_breaks_off_begins_again(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, volume: Path
) -> None:
    server.exec_breaks = [5000, 20_000]
    result = run(capsys, *FETCH)

    assert result.code == 0, result.err
    assert "trying again: the connection to the pod broke off" in result.err
    weights = Path("results", "bert", "model", "weights")
    assert weights.read_bytes() == (volume / "model" / "weights").read_bytes()


def test_fetch_fails_with_one_line_and_leaves_no_pod(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, volume: Path
) -> None:
    server.exec_breaks = [100] * 3
    broken = run(capsys, *FETCH)
    assert broken.code == 1
    assert "spr-cluster: the connection to the pod broke off" in broken.err
    assert readers(server) == []

    volume.rename(volume.with_name("elsewhere"))
    missing = run(capsys, *FETCH)
    assert missing.code == 1
    assert "spr-cluster: in the pod: tar: output: Cannot stat: No such file" in missing.err
    assert readers(server) == []


def test_a_reader_that_can_not_start_is_explained_and_deleted(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, volume: Path
) -> None:
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    state = {
        "phase": "Pending",
        "containerStatuses": [{"image": "x", "state": {"waiting": waiting}}],
    }
    server.on_create = lambda path, found: server.objects[path].update(status=state)
    result = run(capsys, *FETCH)

    assert result.code == 1
    assert "image x can't be pulled: not found" in result.err
    assert readers(server) == []


def test_ctrl_c_deletes_the_reader(
    capsys: pytest.CaptureFixture[str],
    server: KubernetesServer,
    volume: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jobs.cli._exit_at_once", exit_with)
    server.on_create = lambda path, found: None

    def interrupt() -> None:
        wait_for(lambda: any("-reader-" in path for _, path in server.requests))
        os.kill(os.getpid(), signal.SIGINT)

    result = beside(interrupt, lambda: run(capsys, *FETCH))
    assert result.code == 130
    assert readers(server) == []


def test_the_files_of_a_deleted_job_need_their_claim_and_image(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, volume: Path
) -> None:
    del server.objects[JOB]
    refused = run(capsys, *FETCH)
    assert refused.code == 2
    assert "job bert doesn't exist" in refused.err
    result = run(capsys, *FETCH, "--claim", "spr-cluster", *IMAGE, "--json")

    assert json.loads(result.out) == {"job": "bert", "state": "deleted", "results": "results/bert"}
    assert Path("results", "bert", "results.json").is_file()


def test_without_the_right_to_make_pods(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, volume: Path
) -> None:
    server.denied = {("create", "pods")}
    result = run(capsys, *FETCH)

    assert result.code == 1
    assert 'User "ada" cannot create resource "pods"' in result.err
    server.fail = lambda method, path: status(401, "Unauthorized")
    assert "invalid or expired" in run(capsys, *FETCH).err
