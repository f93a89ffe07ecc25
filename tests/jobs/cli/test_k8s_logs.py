"""`k8s submit`, `logs`, and `fetch` of a job that runs: its log over broken connections, and its files."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.kubernetes import api, pod_log
from tests.jobs.cli.test_k8s_client import SUBMIT
from tests.jobs.cli.test_main import run
from tests.jobs.kubernetes.server import (
    IMAGE,
    JOB,
    TRAIN_JOB,
    KubernetesServer,
    ended,
    job,
    status,
)

PODS = "/api/v1/namespaces/ml/pods"
FETCH = ("k8s", "fetch", "bert")


def event(kind: str, **fields: Any) -> str:
    return f"@spr {json.dumps({'event': kind, **fields, 'at': 1.0})}"


def stamped(texts: list[str], per_second: int = 3) -> list[str]:
    """Return the lines as kubelet stamps them: several have one second, some one nanosecond."""
    times = (divmod(number, per_second) for number in range(len(texts)))
    stamps = [
        f"2026-11-22T14:{second // 60:02d}:{second % 60:02d}.{part // 2:09d}Z"
        for second, part in times
    ]
    return [f"{stamp} {text}" for stamp, text in zip(stamps, texts, strict=True)]


def finished(server: KubernetesServer, lines: list[str], code: int = 0) -> None:
    """Keep a job that has ended, with the log of its first pod."""
    job(server, "Failed" if code else "Succeeded")
    phase = "Failed" if code else "Succeeded"
    server.logs[server.pod("bert", 0, phase, **ended(code, "Error" if code else "Completed"))] = (
        lines
    )
    server.logs[server.pod("bert", 1, phase)] = stamped(["second node"])


# logs


def test_logs_prints_events_as_text_and_the_pod_of_a_rank(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    finished(
        server,
        stamped(["before", event("note", text="one note"), event("phase", name="load"), "after"]),
    )

    assert run(capsys, "k8s", "logs", "bert").out == "before\none note\nafter\n"
    assert run(capsys, "k8s", "logs", "bert", "--rank", "1").out == "second node\n"
    refused = run(capsys, "k8s", "logs", "bert", "--rank", "2")
    assert refused.code == 2
    assert "--rank 2: job bert has 2 ranks, from 0" in refused.err


def test_a_log_that_breaks_off_goes_on_without_lost_or_doubled_lines(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    choice = random.Random(3)
    # The same text again and again, in lines that no stamp tells apart.
    texts = [choice.choice(["same", "like it", f"line {number}"]) for number in range(200)]
    finished(server, stamped(texts))
    server.breaks = [choice.randrange(3, 30) for _ in range(40)]
    result = run(capsys, "k8s", "logs", "-f", "bert")

    assert result.code == 0, result.err
    assert result.out.splitlines() == texts
    assert sum(kind == "LOG" for kind, _ in server.requests) > 10


def test_lines_that_are_stamped_out_of_order_are_kept(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    seconds = [5, 4, 5, 6, 5, 6, 7, 6, 7]
    lines = [f"2026-11-22T14:25:0{second}.1Z {n}" for n, second in enumerate(seconds)]
    finished(server, lines)
    server.breaks = [2, 3, 3, 4, 3]
    result = run(capsys, "k8s", "logs", "-f", "bert")

    assert result.out.split() == [str(n) for n in range(len(seconds))]


def test_a_log_that_never_comes_back_is_given_up(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    finished(server, stamped(["first"]))
    server.breaks = [0] * 1000
    result = run(capsys, "k8s", "logs", "-f", "bert")

    assert (result.code, result.out) == (1, "")
    assert "spr-cluster: the stream broke off" in result.err
    assert sum(kind == "LOG" for kind, _ in server.requests) == pod_log._TRIES + 1


def test_logs_follows_a_running_job_to_its_end(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    job(server)
    pod = server.pod("bert", 0, "Running")
    texts = [f"step {number}" for number in range(12)]
    server.logs[pod] = []
    server.breaks = [3, 5]

    def train() -> None:
        for line in stamped(texts):
            server.logs[pod].append(line)
            time.sleep(0.01)
        server.objects[pod]["status"]["phase"] = "Succeeded"
        job(server, "Succeeded")

    result = beside(train, lambda: run(capsys, "k8s", "logs", "-f", "bert"))
    assert result.out.splitlines() == texts


def test_a_silent_log_is_no_failure(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(server)
    pod = server.pod("bert", 0, "Running")
    server.logs[pod] = stamped(["first"])
    monkeypatch.setattr(api, "_TIMEOUT_S", (1.0, 0.05))
    monkeypatch.setattr(pod_log, "_LASTS_S", 0.04)

    def train() -> None:
        wait_for(lambda: sum(kind == "LOG" for kind, _ in server.requests) > pod_log._TRIES + 2)
        server.logs[pod] += stamped(["first", "last"])[1:]
        server.objects[pod]["status"]["phase"] = "Succeeded"
        job(server, "Succeeded")

    result = beside(train, lambda: run(capsys, "k8s", "logs", "-f", "bert"))
    assert (result.code, result.out) == (0, "first\nlast\n"), result.err


def beside(work: Callable[[], None], do: Callable[[], Any]) -> Any:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        return do()
    finally:
        thread.join(timeout=10)


def test_a_replaced_pod_is_followed_too(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    job(server)
    pod = server.pod("bert", 0, "Failed", reason="Evicted", message="disk pressure")
    server.logs[pod] = stamped(["of the first pod"])

    def replace() -> None:
        wait_for(lambda: ("LOG", f"{pod}?") in server.requests)
        server.pod("bert", 0, "Running")
        server.objects[pod]["metadata"]["uid"] = "another"
        server.logs[pod] = stamped(["of the second pod"])
        wait_for(lambda: server.requests.count(("LOG", f"{pod}?")) > 1)
        server.objects[pod]["status"]["phase"] = "Succeeded"
        job(server, "Succeeded")

    result = beside(replace, lambda: run(capsys, "k8s", "logs", "-f", "bert"))
    assert result.out.splitlines() == ["of the first pod", "of the second pod"]


def wait_for(is_true: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true within 5 s")


def test_ctrl_c_leaves_the_job_running_and_says_so(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(server)
    server.logs[server.pod("bert", 0, "Running")] = stamped(["first"])
    monkeypatch.setattr("jobs.cli._exit_at_once", exit_with)

    def interrupt() -> None:
        wait_for(lambda: any(kind == "LOG" for kind, _ in server.requests))
        os.kill(os.getpid(), signal.SIGINT)

    result = beside(interrupt, lambda: run(capsys, "k8s", "logs", "-f", "bert"))
    assert result.code == 130
    assert "job bert goes on without this command" in result.err
    assert "to end it:    spr-cluster k8s delete bert" in result.err
    assert JOB in server.objects


def exit_with(code: int) -> None:
    raise SystemExit(code)


# submit, followed


RESULT = {
    "f1": 81.25,
    "em": 70.5,
    "eval_questions": 100,
    "world_size": 2,
    "backend": "gloo",
    "dtype": "bf16",
    "samples_per_second": 12.5,
    "tokens_per_second": 4800.0,
    "seconds": {"train": 33.0},
    "ranks": [{"hostname": "bert-node-0-0"}, {"hostname": "bert-node-0-1"}],
}


def operator(server: KubernetesServer, phase: str, lines: list[str], **state: Any) -> None:
    """Once a job is created, let its pods end at once."""
    condition = {"type": "Complete" if phase == "Succeeded" else "Failed", "status": "True"}

    def act(path: str, found: dict[str, Any]) -> None:
        if path == TRAIN_JOB:
            pod = server.pod("bert", 0, phase, kind="TrainJob", **state)
            server.logs[pod] = lines
            server.objects[path]["status"] = {"conditions": [condition]}

    server.on_create = act


def test_submit_shows_what_bare_metal_shows(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    start = event("start", world_size=2, hosts=["a", "b"], backend="gloo", dtype="bf16")
    operator(server, "Succeeded", stamped([start, "plain text", event("result", **RESULT)]))
    result = run(capsys, *SUBMIT)

    assert result.code == 0, result.err
    assert "2 ranks on a, b; backend gloo, bf16\nplain text\n" in result.err
    assert result.out.splitlines() == [
        "F1 81.2, exact match 70.5 on 100 questions",
        "world size 2 on 2 hosts (bert-node-0-0, bert-node-0-1), backend gloo, bf16",
        "12.5 samples/s, 4,800 tokens/s, 33.0 s of training",
        "model, predictions, and results.json: /workspace/jobs/bert/output/",
        "to fetch them: spr-cluster k8s fetch bert",
    ]


@pytest.mark.parametrize(
    ("lines", "state", "message"),
    [
        (
            [
                event(
                    "error",
                    message="loss is nan",
                    hint="lower --learning-rate",
                    rank=1,
                    host="b",
                    lost_peer=False,
                )
            ],
            ended(1),
            "loss is nan",
        ),
        ([], ended(137, "OOMKilled"), "was killed on node worker0: its memory ran out"),
        (
            [],
            {"reason": "Evicted", "message": "low on memory"},
            "was evicted from node worker0: low on memory",
        ),
        (["Traceback", "ValueError: x"], ended(1), "ended with exit code 1"),
    ],
    ids=["rank", "memory", "evicted", "exit code"],
)
def test_a_failure_names_its_cause(
    capsys: pytest.CaptureFixture[str],
    server: KubernetesServer,
    lines: list[str],
    state: dict[str, Any],
    message: str,
) -> None:
    operator(server, "Failed", stamped(lines), **state)
    result = run(capsys, *SUBMIT)

    assert (result.code, result.out) == (1, "")
    last = result.err[result.err.index("spr-cluster: ") :]
    assert message in last
    assert "the whole log: spr-cluster k8s logs bert" in " ".join(last.split())


# fetch


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
