"""`k8s submit`, `status`, and `delete` against a minimal API on loopback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.cli.test_main import run
from tests.jobs.kubernetes.server import (
    AMX,
    CLAIM,
    IMAGE,
    JOB,
    TRAIN_JOB,
    TRAINER,
    KubernetesServer,
    ended,
    job,
    node,
    status,
    write_kubeconfig,
)

SUBMIT = ("k8s", "submit", "squad", "--nodes", "2", "--name", "bert", "--demo", *IMAGE)


# submit


def test_submit_creates_claim_and_job_and_names_the_next_commands(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    result = run(capsys, *SUBMIT, "--detach")

    assert result.code == 0, result.err
    assert result.out.splitlines()[0] == "TrainJob bert, 2 pods, new claim spr-cluster"
    assert "  to follow it: spr-cluster k8s logs -f bert" in result.out
    assert server.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert server.objects[TRAIN_JOB]["spec"]["trainer"]["numNodes"] == 2
    assert "warning" not in result.err


def test_the_cluster_decides_the_kind(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    del server.served[TRAINER]
    result = run(capsys, *SUBMIT, "--detach", "--json")

    assert json.loads(result.out) == {
        "job": "bert",
        "kind": "PyTorchJob",
        "claim": "spr-cluster",
        "state": "queued",
    }
    assert JOB in server.objects
    refused = run(capsys, *SUBMIT, "--kind", "TrainJob")
    assert refused.code == 2
    assert "the cluster has no TrainJob\n  → it has PyTorchJob: omit --kind" in refused.err


def test_without_kubeflow_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.served.clear()
    result = run(capsys, *SUBMIT)

    assert result.code == 2
    assert "context lab: the cluster has neither TrainJob nor PyTorchJob" in result.err
    assert "install Kubeflow Trainer 2.2 or newer" in result.err


def test_all_problems_are_one_list_and_nothing_is_created(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.denied = {("create", "trainjobs"), ("get", "pods/log")}
    del server.objects[f"{TRAINER}/clustertrainingruntimes/torch-distributed"]
    hard = {"requests.cpu": "100", "pods": "50", "count/other": "1"}
    used = {"requests.cpu": "16", "pods": "1", "count/other": "1"}
    quotas = "/api/v1/namespaces/ml/resourcequotas"
    server.put(f"{quotas}/team", {"status": {"hard": hard, "used": used}})
    server.put("/apis/storage.k8s.io/v1/storageclasses/nfs", {"provisioner": "ebs.csi.aws.com"})
    before = dict(server.objects)
    result = run(capsys, *SUBMIT, "--pull-secret", "registry")

    assert (result.code, result.out) == (2, "")
    found = [line.strip() for line in result.err.splitlines() if line.startswith("  ")]
    assert [line for line in found if not line.startswith("→")] == [
        "ClusterTrainingRuntime torch-distributed doesn't exist",
        "you may not create trainjobs in namespace ml",
        "you may not get pods/log in namespace ml",
        "quota team: requests.cpu would be exceeded: 16 of 100 used",
        "no storage class is the default",
        "pull secret registry doesn't exist",
    ]
    assert len([line for line in found if line.startswith("→")]) == 6
    assert server.objects == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--namespace", "lab"), "namespace lab doesn't exist\n  → kubectl create namespace lab"),
        (("--claim", "data"), "claim data doesn't exist\n  → `kubectl get pvc`"),
        (("--claim", "disk"), "claim disk is not ReadWriteMany, but pods on several nodes write"),
        (
            ("--storage-class", "nsf"),
            "storage class nsf doesn't exist\n  → the cluster has nfs, gp3",
        ),
        (
            ("--storage-class", "gp3"),
            "storage class gp3 (ebs.csi.aws.com) can't give ReadWriteMany",
        ),
    ],
)
def test_one_problem_is_one_line_with_its_fix(
    capsys: pytest.CaptureFixture[str],
    server: KubernetesServer,
    words: tuple[str, ...],
    message: str,
) -> None:
    claims = "/api/v1/namespaces/ml/persistentvolumeclaims"
    server.put(f"{claims}/disk", {"spec": {"accessModes": ["ReadWriteOnce"]}})
    server.put("/apis/storage.k8s.io/v1/storageclasses/gp3", {"provisioner": "ebs.csi.aws.com"})
    result = run(capsys, *SUBMIT, *words)

    assert result.code == 2
    assert message in result.err
    assert TRAIN_JOB not in server.objects


def test_one_node_needs_no_shared_volume(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.put("/apis/storage.k8s.io/v1/storageclasses/gp3", {"provisioner": "ebs.csi.aws.com"})
    result = run(capsys, *SUBMIT, "--nodes", "1", "--storage-class", "gp3", "--detach")

    assert result.code == 0, result.err
    assert server.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_nodes_that_do_not_fit_are_a_warning(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    node(server, "worker1", spec={"unschedulable": True})
    small = run(capsys, *SUBMIT, "--detach")
    assert small.code == 0
    assert "warning: 1 of 1 suitable node can have a pod of 62 CPUs and 460 GiB" in small.err

    node(server, "worker0", metadata={})
    unlabelled = run(capsys, *SUBMIT, "--name", "two", "--detach")
    assert f"warning: no node has the label {AMX}" in unlabelled.err
    assert "--any-cpu" in unlabelled.err


def test_what_may_not_be_read_is_not_checked(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.denied = {
        ("get", "namespaces"),
        ("list", "nodes"),
        ("list", "resourcequotas"),
        ("list", "storageclasses"),
        ("get", "persistentvolumeclaims"),
        ("get", "secrets"),
        ("get", "clustertrainingruntimes"),
    }
    result = run(capsys, *SUBMIT, "--pull-secret", "registry", "--detach")

    assert result.code == 0, result.err


def test_a_dry_run_asks_the_server_and_creates_nothing(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    before = dict(server.objects)
    result = run(capsys, *SUBMIT, "--dry-run")

    assert result.code == 0, result.err
    assert result.out == (
        "The cluster accepts PersistentVolumeClaim and TrainJob of job bert; nothing was created.\n"
    )
    assert ("POST", TRAIN_JOB.rpartition("/")[0]) in server.requests
    assert server.objects == before

    server.fail = lambda method, path: (
        status(422, 'unknown field "spec.runtimePatches"')
        if "trainjobs" in path and method == "POST"
        else None
    )
    old = run(capsys, *SUBMIT, "--dry-run")
    assert (old.code, old.out) == (1, "")
    assert 'spr-cluster: context lab: unknown field "spec.runtimePatches"' in old.err


def test_an_existing_claim_is_kept_and_an_existing_job_is_refused(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.put(CLAIM, {"spec": {"accessModes": ["ReadWriteMany"]}})
    first = run(capsys, *SUBMIT, "--detach")
    assert first.out.splitlines()[0] == "TrainJob bert, 2 pods, existing claim spr-cluster"

    for words in ((), ("--dry-run",)):
        second = run(capsys, *SUBMIT, *words)
        assert second.code == 2
        assert "spr-cluster: job bert exists already\n  → give another --name" in second.err
        assert "`spr-cluster k8s delete bert`" in second.err


# access


@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        (status(401, "Unauthorized"), "the cluster refuses the credentials of context lab", 1),
        (status(403, 'User "ada" cannot get path'), 'context lab: User "ada" cannot get path', 1),
        (status(500, "etcdserver: no leader"), "context lab: etcdserver: no leader", 1),
    ],
)
def test_a_refusal_is_one_line(
    capsys: pytest.CaptureFixture[str],
    server: KubernetesServer,
    fault: Any,
    message: str,
    code: int,
) -> None:
    server.fail = lambda method, path: fault
    result = run(capsys, "k8s", "status")

    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"spr-cluster: {message}")


def test_a_short_fault_is_no_failure(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    faults = [status(503, "apiserver is shutting down")] * 2
    server.fail = lambda method, path: faults.pop() if faults else None

    assert run(capsys, "k8s", "status").code == 0


def test_a_server_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.close()
    result = run(capsys, "k8s", "status")

    assert result.code == 1
    assert f"spr-cluster: context lab: {server.url} doesn't answer: " in result.err
    assert "refused" in result.err


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, (), "doesn't exist"),
        ("", (), "file is empty"),
        ("hello", (), "kubeconfig: "),
        ("a: [", (), "kubeconfig: "),
        ("contexts: []\nusers: []\nclusters: []\n", (), "Expected key current-context"),
        (None, ("--context", "x"), "doesn't exist"),
        ("ok", ("--context", "x"), "--context x: "),
        ("ok", ("--namespace", "a/../b"), "expected lower-case letters"),
    ],
)
def test_a_kubeconfig_that_is_no_good(
    capsys: pytest.CaptureFixture[str],
    server: KubernetesServer,
    tmp_path: Path,
    content: str | None,
    words: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "kubeconfig"
    if content is None:
        file.unlink()
    elif content != "ok":
        file.write_text(content)
    result = run(capsys, "k8s", "status", *words)

    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) <= 3
    assert server.requests == []


def test_a_credentials_plugin_that_fails_is_named(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer, tmp_path: Path
) -> None:
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", "echo 'token expired' >&2; exit 1"],
    }
    write_kubeconfig(server, tmp_path / "kubeconfig", exec=plugin)
    result = run(capsys, "k8s", "status")

    assert result.code == 2
    assert "context lab: its credentials can't be had: " in result.err
    assert "token expired" in result.err


def test_without_the_client_library_it_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("jobs.kubernetes.kubeconfig")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    result = run(capsys, "k8s", "status")

    assert result.code == 2
    assert (
        "the Python package kubernetes is not installed\n  → in spr-cluster's checkout: pip install '.[k8s]'"
        in result.err
    )


# status


def test_status_lists_jobs_of_both_kinds(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    assert run(capsys, "k8s", "status").out.startswith("No jobs in namespace ml of context lab.")
    job(server)
    server.pod("bert", 0, "Running")
    trainer = {"numNodes": 4, "numProcPerNode": 2, "image": "me/spr:1"}
    conditions = [{"type": "Complete", "status": "True"}]
    server.put(
        f"{TRAINER}/namespaces/ml/trainjobs/old",
        {
            "metadata": {"creationTimestamp": "2026-11-21T14:25:01Z"},
            "spec": {"trainer": trainer},
            "status": {"conditions": conditions},
        },
    )
    found = run(capsys, "k8s", "status")

    rows = [line.split()[:4] for line in found.out.splitlines()]
    assert rows == [
        ["JOB", "KIND", "STATE", "NODES"],
        ["old", "TrainJob", "succeeded", "4"],
        ["bert", "PyTorchJob", "running", "2"],
    ]
    listed = json.loads(run(capsys, "k8s", "status", "--json").out)
    assert [each["ranks_per_node"] for each in listed["jobs"]] == [2, 1]


def waiting(reason: str, message: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"image": "ghcr.io/me/spr:1", "state": state}]}


UNSCHEDULABLE = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient cpu.",
        }
    ]
}


@pytest.mark.parametrize(
    ("phase", "state", "text", "fix"),
    [
        (
            "Pending",
            UNSCHEDULABLE,
            "no node can take pod bert-master-0: 0/2 nodes are available: 2 Insufficient cpu.",
            "describe the nodes with --cores",
        ),
        (
            "Pending",
            waiting("ImagePullBackOff", "Back-off pulling image"),
            "pod bert-master-0: image ghcr.io/me/spr:1 can't be pulled: Back-off pulling image",
            "push it to a registry",
        ),
        (
            "Pending",
            waiting("CreateContainerConfigError", "container has runAsNonRoot"),
            "pod bert-master-0 can't start: CreateContainerConfigError: container has runAsNonRoot",
            "",
        ),
        (
            "Failed",
            {"reason": "Evicted", "message": "The node was low on resource: memory."},
            "pod bert-master-0 was evicted from node worker0: The node was low on resource: memory.",
            "--memory",
        ),
        (
            "Failed",
            ended(137, "OOMKilled"),
            "pod bert-master-0 was killed on node worker0: its memory ran out",
            "--batch-size",
        ),
        ("Failed", ended(3), "pod bert-master-0 ended with exit code 3", ""),
    ],
)
def test_status_says_why_a_job_does_not_run(
    capsys: pytest.CaptureFixture[str],
    server: KubernetesServer,
    phase: str,
    state: dict[str, Any],
    text: str,
    fix: str,
) -> None:
    job(server)
    server.pod("bert", 0, phase, **state)
    shown = run(capsys, "k8s", "status", "bert")
    found = json.loads(run(capsys, "k8s", "status", "bert", "--json").out)

    assert text in shown.out.splitlines()
    assert [each["text"] for each in found["troubles"]] == [text]
    assert fix in found["troubles"][0]["fix"]


def test_status_shows_a_quota_that_keeps_pods_from_being_made(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    job(server)
    message = 'pods "bert-master-0" is forbidden: exceeded quota: team, requested: cpu=62'
    for name, about in (("1", "bert"), ("2", "bertha")):
        event = {"type": "Warning", "message": message, "involvedObject": {"name": about}}
        server.put(f"/api/v1/namespaces/ml/events/{name}", event)
    result = run(capsys, "k8s", "status", "bert")

    assert f"no pods: {message}\n  → ask for less, or have the quota raised" in result.out


def test_a_job_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    for action in ("status", "logs"):
        result = run(capsys, "k8s", action, "bert")
        assert result.code == 2
        assert "spr-cluster: no job bert in namespace ml of context lab" in result.err


# delete


def test_delete_removes_the_job_and_keeps_the_claim(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.put(CLAIM, {})
    job(server)
    server.pod("bert", 0, "Running")
    asked = run(capsys, "k8s", "delete", "bert")
    assert asked.code == 2
    assert "this needs confirmation" in asked.err
    assert JOB in server.objects

    done = run(capsys, "k8s", "delete", "bert", "--yes")
    assert (done.code, done.out) == (0, "Job bert is gone.\n")
    assert JOB not in server.objects
    assert CLAIM in server.objects
    again = run(capsys, "k8s", "delete", "bert", "-y")
    assert (again.code, again.out) == (0, "No job bert in namespace ml: nothing to delete.\n")


def test_delete_with_its_claim(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    server.put(CLAIM, {})
    job(server)
    done = run(capsys, "k8s", "delete", "bert", "--yes", "--claim", "--json")

    assert json.loads(done.out) == {"job": "bert", "deleted": True, "claim": "spr-cluster"}
    assert CLAIM not in server.objects


def test_delete_without_the_right_says_whose_it_lacks(
    capsys: pytest.CaptureFixture[str], server: KubernetesServer
) -> None:
    job(server)
    server.denied = {("delete", "pytorchjobs")}
    result = run(capsys, "k8s", "delete", "bert", "--yes")

    assert result.code == 1
    assert 'User "ada" cannot delete resource "pytorchjobs"' in result.err
    assert "  → ask the cluster's administrator" in result.err
