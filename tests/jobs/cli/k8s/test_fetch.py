"""`fetch` from Kubernetes: a job's files from its claim, over a real web socket."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate.utils import validate

from jobs.launchers.kubernetes import results_reader
from jobs.launchers.record import JobRecord
from jobs.train.predict import find_model
from tests.jobs.cli.k8s.test_logs import (
    RESULT,
    beside,
    exit_with,
    finished,
    stamped,
    wait_for,
)
from tests.jobs.cli.k8s.test_submit import SUBMIT
from tests.jobs.cli.test_main import run
from tests.jobs.launchers.kubernetes.rendering import rendered
from tests.jobs.launchers.kubernetes.scenes import CLAIM, IMAGE, JOB, TRAIN_JOB, K8s
from tests.jobs.launchers.kubernetes.server import KubernetesServer, status
from tests.jobs.launchers.kubernetes.test_manifests import require_restricted

FETCH = ("fetch", "bert")


@pytest.fixture
def volume(server: KubernetesServer, tmp_path: Path) -> Path:
    """The claim with the files of a job that has succeeded, and a cluster that starts pods."""
    server.put(CLAIM, {"spec": {"accessModes": ["ReadWriteMany"]}})
    finished(server, stamped(["the log"]))
    server.volume = tmp_path / "volume"
    output = server.volume / "jobs" / "bert" / "output"
    state = output.with_name("output.state")
    for folder in (output / "model", state / "metrics", state / "checkpoints/step-000001"):
        folder.mkdir(parents=True)
    (output / "results.json").write_text(json.dumps(RESULT))
    (output / "model" / "weights").write_bytes(random.Random(1).randbytes(3_000_000))
    (state / "metrics" / "rank-0.jsonl").write_text("")
    (state / "checkpoints" / "step-000001" / "state").write_text("large")

    start_readers(server, phase="Running")
    return output


def start_readers(server: KubernetesServer, node: str = "", **state: Any) -> list[dict[str, Any]]:
    """Let each pod that is created have this state; return the list of them."""
    created: list[dict[str, Any]] = []

    def start(path: str, found: dict[str, Any]) -> None:
        created.append(found)
        server.objects[path]["status"] = state
        server.objects[path]["spec"] = {**found["spec"], "nodeName": node}

    server.on_create = start
    return created


def readers(server: KubernetesServer) -> list[str]:
    return [path for path in server.objects if "-reader-" in path]


def test_fetch_brings_what_bare_metal_brings(
    capsys: pytest.CaptureFixture[str], k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    created = start_readers(server, phase="Running")
    result = k8s(*FETCH)

    assert result.code == 0, result.err
    assert result.out == "bert (succeeded): results/bert/\n"
    found = Path("results", "bert")
    assert (found / "model" / "weights").read_bytes() == (volume / "model" / "weights").read_bytes()
    names = {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()}
    assert names == {
        "results.json",
        "model/weights",
        "job/metrics/rank-0.jsonl",
        "job/log",
        "job/job.json",
    }
    assert (found / "job/log").read_text() == "the log\n"
    assert run(capsys, "report", "bert").code == 0
    assert readers(server) == []
    spec = created[0]["spec"]
    assert spec["containers"][0]["image"] == "ghcr.io/me/spr:1"
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "spr-cluster"}
    assert spec["containers"][0]["volumeMounts"][0]["readOnly"] is True
    assert spec["automountServiceAccountToken"] is False
    require_restricted(spec)


def test_a_download_that_breaks_off_begins_again(
    k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    server.exec_breaks = [5000, 20_000]
    result = k8s(*FETCH)

    assert result.code == 0, result.err
    assert "trying again: the connection to the pod broke off" in result.err
    weights = Path("results", "bert", "model", "weights")
    assert weights.read_bytes() == (volume / "model" / "weights").read_bytes()


def test_fetch_fails_with_one_line_and_leaves_no_pod(
    k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    server.exec_breaks = [100] * 3
    broken = k8s(*FETCH)
    assert broken.code == 1
    assert "spr-cluster: the connection to the pod broke off" in broken.err
    assert readers(server) == []

    volume.rename(volume.with_name("elsewhere"))
    missing = k8s(*FETCH)
    assert missing.code == 1
    assert "spr-cluster: in the pod: tar: output: Cannot stat: No such file" in missing.err
    assert readers(server) == []


@pytest.mark.parametrize(("faults", "left"), [(1, 0), (99, 1)])
def test_a_reader_that_can_not_be_deleted_costs_no_files(
    k8s: K8s, server: KubernetesServer, volume: Path, faults: int, left: int
) -> None:
    faulty = [status(503, "apiserver is shutting down")] * faults
    server.fail = lambda method, path: faulty.pop() if method == "DELETE" and faulty else None
    result = k8s(*FETCH)

    assert result.code == 0, result.err
    assert Path("results/bert/job/log").read_text() == "the log\n"
    assert Path("results/bert/job/job.json").is_file()
    assert len(readers(server)) == left
    for path in readers(server):
        name = path.rpartition("/")[2]
        warning = f"warning: pod {name} may be left: context lab: apiserver is shutting down"
        assert f"{warning}\n  → kubectl --context lab -n ml delete pod {name}\n" in result.err
    assert ("may be left" in result.err) is bool(left)


def test_the_first_error_is_shown_if_the_reader_stays(
    k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    server.exec_breaks = [100] * 3
    server.fail = lambda method, path: status(503, "busy") if method == "DELETE" else None
    result = k8s(*FETCH)

    assert result.code == 1
    assert "spr-cluster: the connection to the pod broke off" in result.err
    assert "may be left: context lab: busy" in result.err


def test_a_reader_that_can_not_start_is_explained_and_deleted(
    k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    states = [{"image": "x", "state": {"waiting": waiting}}]
    start_readers(server, "worker0", phase="Pending", containerStatuses=states)
    result = k8s(*FETCH)

    assert result.code == 1
    assert "image x can't be pulled: not found" in result.err
    assert readers(server) == []


def test_ctrl_c_deletes_the_reader(
    k8s: K8s, server: KubernetesServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.__main__._exit_at_once", exit_with)
    server.on_create = lambda path, found: None

    def interrupt() -> None:
        wait_for(lambda: any("-reader-" in path for _, path in server.requests))
        os.kill(os.getpid(), signal.SIGINT)

    result = beside(interrupt, lambda: k8s(*FETCH))
    assert result.code == 130
    assert readers(server) == []


def test_the_files_of_a_deleted_job_need_their_claim_and_image(
    k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    del server.objects[JOB]
    refused = k8s(*FETCH)
    assert refused.code == 2
    assert "there is no job in namespace ml" in refused.err
    created = start_readers(server, phase="Running")
    words = ("--claim", "spr-cluster", *IMAGE, "--pull-secret", "registry")
    result = k8s(*FETCH, *words, "--json")

    assert created[0]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    require_restricted(created[0]["spec"])
    found = json.loads(result.out)
    assert (found["job"], found["state"], found["results"]) == ("bert", "deleted", "results/bert")
    assert Path("results", "bert", "results.json").is_file()


def test_the_id_is_enough_where_the_job_was_submitted(
    capsys: pytest.CaptureFixture[str], k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    del server.objects[JOB]
    assert k8s(*SUBMIT, "--detach").code == 0
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    server.objects[TRAIN_JOB]["status"] = done
    server.logs[server.pod("bert", 0, "Succeeded", kind="TrainJob")] = stamped(["the log"])

    shown = run(capsys, "jobs", "bert")
    assert "TrainJob, image ghcr.io/me/spr:1, claim spr-cluster" in shown.out
    assert run(capsys, "logs", "bert").out == "the log\n"
    assert run(capsys, "wait", "bert").code == 0
    attached = run(capsys, "attach", "bert")
    assert attached.code == 0, attached.err
    assert attached.out.splitlines()[0] == "F1 81.2, exact match 70.5 on 100 records"
    assert Path("results/bert/model/weights").is_file()
    assert run(capsys, "cancel", "bert").out == "Job bert is gone.\n"
    fetched = run(capsys, "fetch", "bert", "--results", "again")
    assert fetched.out == "bert (deleted): again/\n", fetched.err

    both = run(capsys, "jobs", "bert", "--name", "spr", "--namespace", "ml")
    assert both.code == 2
    assert "--namespace is for jobs on Kubernetes: omit --name" in both.err
    ends = run(capsys, "attach", "bert", "--down-when-done")
    assert ends.code == 2
    assert "--down-when-done are for jobs on a cluster of this tool" in ends.err


@pytest.mark.parametrize(
    "right",
    [("create", "pods"), ("delete", "pods"), ("create", "pods/exec"), ("get", "pods/exec")],
    ids=" ".join,
)
def test_a_missing_right_is_named_before_anything_is_created(
    k8s: K8s, server: KubernetesServer, volume: Path, right: tuple[str, str]
) -> None:
    server.denied = {right}
    result = k8s(*FETCH)

    verb, what = right
    assert result.code == 2
    assert f"spr-cluster: you may not {verb} {what} in namespace ml\n" in result.err
    assert f"  → request a role with verb {verb} on {what}" in result.err
    assert ("POST", "/api/v1/namespaces/ml/pods") not in server.requests
    assert not Path("results").exists()
    server.fail = lambda method, path: status(401, "Unauthorized")
    assert "invalid or expired" in k8s(*FETCH).err


def test_a_missing_claim_is_named(k8s: K8s, server: KubernetesServer, volume: Path) -> None:
    del server.objects[CLAIM]
    result = k8s(*FETCH)

    assert (result.code, result.out) == (2, "")
    assert "spr-cluster: claim spr-cluster doesn't exist" in result.err


@pytest.mark.parametrize(
    ("mode", "phase", "rule"),
    [
        ("ReadWriteMany", "Running", None),
        ("ReadWriteOnce", "Running", "required"),
        ("ReadWriteOnce", "Succeeded", "preferred"),
        ("ReadWriteOncePod", "Succeeded", "preferred"),
    ],
)
def test_a_volume_of_one_node_is_read_on_that_node(
    k8s: K8s, server: KubernetesServer, volume: Path, mode: str, phase: str, rule: str | None
) -> None:
    server.put(CLAIM, {"spec": {"accessModes": [mode]}})
    server.logs[server.pod("bert", 1, phase)] = []
    created = start_readers(server, phase="Running")
    result = k8s(*FETCH)

    assert result.code == 0, result.err
    validate(created[0], "1.33", strict=True)
    rules = created[0]["spec"].get("affinity", {}).get("nodeAffinity", {})
    assert [name.partition("During")[0] for name in rules] == ([rule] if rule else [])
    # Of two pods that are over, the first.
    node = "worker1" if phase == "Running" else "worker0"
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    assert not rule or str(field) in str(rules)


def test_a_volume_of_one_pod_is_refused_while_that_runs(
    k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    server.put(CLAIM, {"spec": {"accessModes": ["ReadWriteOncePod"]}})
    server.pod("bert", 1, "Running")
    result = k8s(*FETCH)

    assert result.code == 2
    assert "claim spr-cluster serves one pod at a time, and pod bert-worker-0 has it" in result.err
    assert ("POST", "/api/v1/namespaces/ml/pods") not in server.requests


UNSCHEDULABLE = {
    "reason": "Unschedulable",
    "status": "False",
    "message": "0/2 nodes are available: 1 Insufficient cpu",
}


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [([UNSCHEDULABLE], "0/2 nodes are available: 1 Insufficient cpu"), ([], "Multi-Attach error")],
    ids=["no node", "no volume"],
)
def test_a_reader_that_does_not_start_in_time_is_explained_and_deleted(
    k8s: K8s,
    server: KubernetesServer,
    volume: Path,
    monkeypatch: pytest.MonkeyPatch,
    conditions: list[dict[str, str]],
    reason: str,
) -> None:
    monkeypatch.setattr(results_reader, "_START_DEADLINE_S", 0.05)
    server.put(CLAIM, {"spec": {"accessModes": ["ReadWriteOnce"]}})
    server.pod("bert", 1, "Running")
    start_readers(server, phase="Pending", conditions=conditions)
    create = server.on_create

    def create_and_warn(path: str, found: dict[str, Any]) -> None:
        create(path, found)
        about = {"uid": path}
        event = {"type": "Warning", "message": "Multi-Attach error", "involvedObject": about}
        server.put("/api/v1/namespaces/ml/events/1", event)

    server.on_create = create_and_warn
    result = k8s(*FETCH)

    assert result.code == 1
    assert "spr-cluster: the start of pod bert-reader-" in result.err
    last = " ".join(result.err[result.err.index("spr-cluster: ") :].split())
    assert reason in last
    assert "serves one node at a time, now worker1, where pod bert-worker-0 runs" in last
    assert readers(server) == []


def test_the_record_says_what_bare_metals_says(
    k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    words = ("--kind", "PyTorchJob", "--stack", "intel", "--nodes", "2", "--ppn", "2", *IMAGE)
    made = rendered(*words).job
    condition = {"type": "Succeeded", "status": "True"}
    server.put(JOB, {**made, "status": {"conditions": [condition]}})
    over = {
        "exitCode": 0,
        "startedAt": "2026-11-22T14:26:00Z",
        "finishedAt": "2026-11-22T14:27:30Z",
    }
    server.logs[
        server.pod("bert", 0, "Succeeded", containerStatuses=[{"state": {"terminated": over}}])
    ] = []
    assert k8s(*FETCH).code == 0
    record = json.loads(Path("results/bert/job/job.json").read_text())

    command = record.pop("command")
    assert command == shlex.join(record.pop("argv"))
    assert command.startswith("torchrun -m worker.tasks squad ")
    assert record == {
        "job": "bert",
        "kind": "squad",
        "cluster": "lab",
        "cloud": "kubernetes",
        "nodes": [
            {"name": "worker0", "pod": "bert-master-0"},
            {"name": "worker1", "pod": "bert-worker-0"},
        ],
        "nnodes": 2,
        "placement": {"nproc_per_node": 2, "omp_threads": 14, "ccl_workers": 1},
        "stack": "intel",
        "when": "2026-11-22T14:25:01+00:00",
        "state": "succeeded",
        "ended": "2026-11-22T14:27:30+00:00",
        "seconds": 90.0,
        "exit_code": 0,
        "more": {
            "kind": "PyTorchJob",
            "namespace": "ml",
            "image": "ghcr.io/me/spr:1",
            "claim": "spr-cluster",
        },
    }
    assert record.keys() <= JobRecord.__dataclass_fields__.keys()


def test_report_and_predict_read_the_folder(
    capsys: pytest.CaptureFixture[str], k8s: K8s, server: KubernetesServer, volume: Path
) -> None:
    server.put(JOB, rendered("--kind", "PyTorchJob", *IMAGE).job)
    (volume / "model" / "config.json").write_text("{}")
    assert k8s(*FETCH).code == 0
    reported = run(capsys, "report", "bert", "--json")

    assert reported.code == 0, reported.err
    assert json.loads(reported.out)["usd_of_run"] is None
    page = re.sub(r"<[^>]*>|\s", " ", Path("results/bert/report.html").read_text())
    facts = "job bert cluster lab cloud kubernetes stack upstream command torchrun -m worker.tasks squad"
    assert facts in " ".join(page.split())
    assert "region" not in page
    assert find_model("bert") == Path("results/bert/model")
