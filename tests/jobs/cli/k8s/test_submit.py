"""`k8s submit`: its checks, what it creates, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.jobs.launchers.kubernetes.scenes import AMX, CLAIM, IMAGE, JOB, TRAIN_JOB, K8s, node
from tests.jobs.launchers.kubernetes.server import TRAINER, KubernetesServer, status

SUBMIT = ("submit", "squad", "--nodes", "2", "--name", "bert", "--demo", *IMAGE)


# submit


def test_submit_creates_claim_and_job_and_names_the_next_commands(
    k8s: K8s, server: KubernetesServer
) -> None:
    result = k8s(*SUBMIT, "--detach")

    assert result.code == 0, result.err
    assert result.out.splitlines()[0] == "TrainJob bert, 2 pods, new claim spr-cluster"
    assert "  to follow it: spr-cluster attach bert" in result.out
    assert server.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert server.objects[TRAIN_JOB]["spec"]["trainer"]["numNodes"] == 2
    assert "warning" not in result.err


def test_the_cluster_decides_the_kind(k8s: K8s, server: KubernetesServer) -> None:
    del server.served[TRAINER]
    result = k8s(*SUBMIT, "--detach", "--json")

    assert json.loads(result.out) == {
        "job": "bert",
        "kind": "PyTorchJob",
        "claim": "spr-cluster",
        "state": "queued",
    }
    assert JOB in server.objects
    refused = k8s(*SUBMIT, "--kind", "TrainJob")
    assert refused.code == 2
    assert "the cluster has no TrainJob\n  → it has PyTorchJob: omit --kind" in refused.err


@pytest.mark.parametrize(
    ("denied", "kind"), [("trainjobs", "PyTorchJob"), ("pytorchjobs", "TrainJob")]
)
def test_a_role_for_one_kind_is_enough(
    k8s: K8s, server: KubernetesServer, denied: str, kind: str
) -> None:
    server.denied = {(verb, denied) for verb in ("create", "get", "list", "delete")}
    submitted = k8s(*SUBMIT, "--detach")

    assert submitted.code == 0, submitted.err
    assert submitted.out.splitlines()[0] == f"{kind} bert, 2 pods, new claim spr-cluster"
    assert [each["job"] for each in json.loads(k8s("jobs", "--json").out)["jobs"]] == ["bert"]
    assert json.loads(k8s("jobs", "bert", "--json").out)["kind"] == kind
    assert k8s("cancel", "bert", "--yes").out == "Job bert is gone.\n"
    assert json.loads(k8s("jobs", "bert", "--json").out)["state"] == "deleted"
    refused = k8s(*SUBMIT, "--kind", "TrainJob" if kind == "PyTorchJob" else "PyTorchJob")
    assert refused.code == 2
    assert f"you may not create {denied} in namespace ml" in refused.err


def test_a_role_for_no_kind_is_named(k8s: K8s, server: KubernetesServer) -> None:
    server.denied = {("list", kind) for kind in ("trainjobs", "pytorchjobs")}
    result = k8s("jobs", "bert")

    assert result.code == 1
    assert 'User "ada" cannot list resource "trainjobs"' in result.err


def test_without_kubeflow_it_says_what_to_install(k8s: K8s, server: KubernetesServer) -> None:
    server.served.clear()
    result = k8s(*SUBMIT)

    assert result.code == 2
    assert "context lab: the cluster has neither TrainJob nor PyTorchJob" in result.err
    assert "install Kubeflow Trainer 2.2 or newer" in result.err


def test_all_problems_are_one_list_and_nothing_is_created(
    k8s: K8s, server: KubernetesServer
) -> None:
    server.denied = {("create", "trainjobs"), ("get", "pods/log")}
    del server.objects[f"{TRAINER}/clustertrainingruntimes/torch-distributed"]
    hard = {"requests.cpu": "100", "pods": "50", "count/other": "1"}
    used = {"requests.cpu": "16", "pods": "1", "count/other": "1"}
    quotas = "/api/v1/namespaces/ml/resourcequotas"
    server.put(f"{quotas}/team", {"status": {"hard": hard, "used": used}})
    server.put("/apis/storage.k8s.io/v1/storageclasses/nfs", {"provisioner": "ebs.csi.aws.com"})
    before = dict(server.objects)
    result = k8s(*SUBMIT, "--kind", "TrainJob", "--pull-secret", "registry", "--hub-secret", "hub")

    assert (result.code, result.out) == (2, "")
    found = [line.strip() for line in result.err.splitlines() if line.startswith("  ")]
    assert [line for line in found if not line.startswith("→")] == [
        "ClusterTrainingRuntime torch-distributed doesn't exist",
        "you may not create trainjobs in namespace ml",
        "you may not get pods/log in namespace ml",
        "quota team: requests.cpu would be exceeded: 16 of 100 used",
        "no storage class is the default",
        "pull secret registry doesn't exist",
        "hub secret hub doesn't exist",
    ]
    assert len([line for line in found if line.startswith("→")]) == 7
    assert server.objects == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--namespace", "lab"), "namespace lab doesn't exist\n  → kubectl create namespace lab"),
        (("--claim", "data"), "claim data doesn't exist\n  → `kubectl get pvc`"),
        (("--hub-secret", "empty"), "hub secret empty has no key HF_TOKEN\n  → kubectl create"),
        (("--claim", "leaving"), "claim leaving is being deleted, and no new pod can have it"),
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
    k8s: K8s, server: KubernetesServer, words: tuple[str, ...], message: str
) -> None:
    claims = "/api/v1/namespaces/ml/persistentvolumeclaims"
    server.put("/api/v1/namespaces/ml/secrets/empty", {"data": {"TOKEN": ""}})
    server.put(f"{claims}/disk", {"spec": {"accessModes": ["ReadWriteOnce"]}})
    server.put(f"{claims}/leaving", {"metadata": {"deletionTimestamp": "2026-11-22T14:25:01Z"}})
    server.put("/apis/storage.k8s.io/v1/storageclasses/gp3", {"provisioner": "ebs.csi.aws.com"})
    result = k8s(*SUBMIT, *words)

    assert result.code == 2
    assert message in result.err
    assert TRAIN_JOB not in server.objects


def test_one_node_needs_no_shared_volume(k8s: K8s, server: KubernetesServer) -> None:
    server.put("/apis/storage.k8s.io/v1/storageclasses/gp3", {"provisioner": "ebs.csi.aws.com"})
    result = k8s(*SUBMIT, "--nodes", "1", "--storage-class", "gp3", "--detach")

    assert result.code == 0, result.err
    assert server.objects[CLAIM]["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_nodes_that_do_not_fit_are_a_warning(k8s: K8s, server: KubernetesServer) -> None:
    node(server, "worker1", spec={"unschedulable": True})
    small = k8s(*SUBMIT, "--detach")
    assert small.code == 0
    assert "warning: 1 of 1 suitable node can have a pod of 62 CPUs and 460 GiB" in small.err
    for cpu, memory in (("61", "500Gi"), ("62", "459Gi")):
        node(server, "worker1", status={"allocatable": {"cpu": cpu, "memory": memory}})
        assert (
            "warning: 1 of 2 suitable nodes can" in k8s(*SUBMIT, "--dry-run", "--name", "one").err
        )

    node(server, "worker1", spec={"unschedulable": True})
    node(server, "worker0", metadata={})
    unlabelled = k8s(*SUBMIT, "--name", "two", "--detach")
    assert f"warning: no node has the label {AMX}" in unlabelled.err
    assert "--any-cpu" in unlabelled.err
    other = k8s(*SUBMIT, "--name", "three", "--detach", "--any-cpu", "--node-selector", "pool=a")
    assert "warning: no node has the label pool=a\n" in other.err
    bad = k8s(*SUBMIT, "--node-selector", "pool")
    assert (bad.code, "expected a node's label, KEY=VALUE" in bad.err) == (2, True)


def test_what_may_not_be_read_is_not_checked(k8s: K8s, server: KubernetesServer) -> None:
    server.denied = {
        ("get", "namespaces"),
        ("list", "nodes"),
        ("list", "resourcequotas"),
        ("list", "storageclasses"),
        ("get", "persistentvolumeclaims"),
        ("get", "secrets"),
        ("get", "clustertrainingruntimes"),
    }
    result = k8s(*SUBMIT, "--pull-secret", "registry", "--hub-secret", "hub", "--detach")

    assert result.code == 0, result.err


def test_a_dry_run_asks_the_server_and_creates_nothing(k8s: K8s, server: KubernetesServer) -> None:
    before = dict(server.objects)
    result = k8s(*SUBMIT, "--dry-run")

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
    old = k8s(*SUBMIT, "--dry-run")
    assert (old.code, old.out) == (1, "")
    assert 'spr-cluster: context lab: unknown field "spec.runtimePatches"' in old.err


def test_a_job_that_the_cluster_refuses_leaves_no_claim(k8s: K8s, server: KubernetesServer) -> None:
    refusal = status(403, "trainjobs is forbidden: exceeded quota: team")
    jobs = TRAIN_JOB.rpartition("/")[0]
    server.fail = lambda method, path: refusal if (method, path) == ("POST", jobs) else None
    result = k8s(*SUBMIT, "--detach")

    assert (result.code, result.out) == (1, "")
    assert "exceeded quota: team" in result.err
    assert CLAIM not in server.objects


def test_an_existing_claim_is_kept_and_an_existing_job_is_refused(
    k8s: K8s, server: KubernetesServer
) -> None:
    server.put(CLAIM, {"spec": {"accessModes": ["ReadWriteMany"]}})
    first = k8s(*SUBMIT, "--detach")
    assert first.out.splitlines()[0] == "TrainJob bert, 2 pods, existing claim spr-cluster"
    claims = CLAIM.rpartition("/")[0]
    assert ("POST", claims) not in server.requests, "a quota would refuse another claim"
    server.denied = {("get", "persistentvolumeclaims")}
    unread = k8s(*SUBMIT, "--name", "two", "--detach")
    assert unread.out.splitlines()[0] == "TrainJob two, 2 pods, existing claim spr-cluster"
    assert ("POST", claims) in server.requests

    for words in ((), ("--dry-run",)):
        second = k8s(*SUBMIT, *words)
        assert second.code == 2
        assert "spr-cluster: job bert exists already\n  → give another --name" in second.err
        assert "`spr-cluster cancel bert`" in second.err
