"""`jobs` and `cancel` of jobs on Kubernetes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs.launchers.kubernetes import jobs
from tests.jobs.launchers.kubernetes.scenes import CLAIM, JOB, TRAIN_JOB, K8s, ended, job
from tests.jobs.launchers.kubernetes.server import TRAINER, Answer, KubernetesServer


def test_status_lists_jobs_of_both_kinds(k8s: K8s, server: KubernetesServer) -> None:
    assert k8s("jobs").out.startswith("No jobs in namespace ml of context lab.")
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
    found = k8s("jobs")

    rows = [line.split()[:4] for line in found.out.splitlines()]
    assert rows == [
        ["JOB", "STATE", "NODES", "BEGAN"],
        ["old", "succeeded", "-", "-"],
        ["bert", "running", "1", "-"],
    ]
    listed = json.loads(k8s("jobs", "--json").out)
    assert [each["ranks_per_node"] for each in listed["jobs"]] == [2, 1]


def waiting(reason: str, message: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"image": "ghcr.io/me/spr:1", "state": state}]}


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return {"conditions": [{**condition, "message": f"0/2 nodes are available: 2 {message}."}]}


@pytest.mark.parametrize(
    ("phase", "state", "text", "fix"),
    [
        (
            "Pending",
            unschedulable("Insufficient cpu"),
            "no node can take pod bert-master-0: 0/2 nodes are available: 2 Insufficient cpu.",
            "describe the nodes with --cores",
        ),
        (
            "Pending",
            unschedulable("pod has unbound immediate PersistentVolumeClaims"),
            "no node can take pod bert-master-0: 0/2 nodes are available: 2 pod has unbound immediate "
            "PersistentVolumeClaims.",
            "`kubectl describe pvc` says",
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
    k8s: K8s, server: KubernetesServer, phase: str, state: dict[str, Any], text: str, fix: str
) -> None:
    job(server)
    server.pod("bert", 0, phase, **state)
    shown = k8s("jobs", "bert")
    found = json.loads(k8s("jobs", "bert", "--json").out)

    assert text in shown.out.splitlines()
    assert [each["text"] for each in found["problems"]] == [text]
    assert fix in found["problems"][0]["fix"]


def test_status_shows_a_quota_that_keeps_pods_from_being_made(
    k8s: K8s, server: KubernetesServer
) -> None:
    job(server)
    message = 'pods "bert-master-0" is forbidden: exceeded quota: team, requested: cpu=62'
    for name, about in (("1", "bert"), ("2", "bert-large")):
        what = {"kind": "PyTorchJob", "name": about, "uid": JOB.replace("bert", about)}
        text = message if about == "bert" else "of another job"
        event = {"type": "Warning", "message": text, "involvedObject": what}
        server.put(f"/api/v1/namespaces/ml/events/{name}", event)
    result = k8s("jobs", "bert")

    assert f"no pods: {message}\n  → request less, or have the quota raised" in result.out
    server.denied = {("list", "events")}
    assert k8s("jobs", "bert").code == 0


@pytest.mark.parametrize(
    ("about", "at"),
    [
        ({"kind": "Pod", "name": "bert-worker-0"}, "2026-11-22T14:26:00Z"),
        ({"kind": "PyTorchJob", "name": "bert", "uid": "x"}, "2026-11-22T14:26:00Z"),
        ({"kind": "PyTorchJob", "name": "bert-large"}, "2026-11-22T14:26:00Z"),
    ],
    ids=["about a pod that is gone", "about an earlier job", "about another job"],
)
def test_an_event_that_says_nothing_about_a_job_without_pods(
    k8s: K8s, server: KubernetesServer, about: dict[str, str], at: str
) -> None:
    job(server)
    event = {"type": "Warning", "message": "old", "involvedObject": about, "lastTimestamp": at}
    server.put("/api/v1/namespaces/ml/events/1", event)

    assert "no pods" not in k8s("jobs", "bert").out


@pytest.mark.parametrize(
    ("about", "at", "is_shown"),
    [
        ({"kind": "JobSet", "name": "bert"}, "2026-11-22T14:26:00Z", True),
        ({"kind": "Job", "name": "bert-node-0"}, "2026-11-22T14:26:00Z", True),
        ({"kind": "Job", "name": "bert-node-0"}, "2026-11-22T14:24:00Z", False),
        ({"kind": "JobSet", "name": "bert-node-0"}, "2026-11-22T14:26:00Z", False),
        ({"kind": "Job", "name": "bert-large-node-0"}, "2026-11-22T14:26:00Z", False),
    ],
)
def test_events_about_what_trainer_makes_of_a_job(
    k8s: K8s, server: KubernetesServer, about: dict[str, str], at: str, is_shown: bool
) -> None:
    server.put(TRAIN_JOB, {"spec": {"trainer": {"numNodes": 2}}})
    event = {"type": "Warning", "message": "no", "involvedObject": about, "lastTimestamp": at}
    server.put("/api/v1/namespaces/ml/events/1", event)

    assert ("no pods: no" in k8s("jobs", "bert").out) is is_shown


def test_pods_with_one_reason_are_one_problem(k8s: K8s, server: KubernetesServer) -> None:
    job(server)
    refused = "rpc error: code = Unknown desc = failed to pull: connection refused"
    for index in range(2):
        server.pod("bert", index, "Pending", **waiting("ErrImagePull", refused))
    found = json.loads(k8s("jobs", "bert", "--json").out)

    text = "image ghcr.io/me/spr:1 can't be pulled: failed to pull: connection refused"
    assert [each["text"] for each in found["problems"]] == [
        f"pod bert-master-0: {text} (and 1 other pod)"
    ]


def test_a_job_that_does_not_exist(k8s: K8s, server: KubernetesServer) -> None:
    for action in ("jobs", "logs"):
        result = k8s(action, "bert")
        assert result.code == 2
        assert "spr-cluster: there is no job in namespace ml of context lab" in result.err


def test_delete_removes_the_job_and_keeps_the_claim(k8s: K8s, server: KubernetesServer) -> None:
    server.put(CLAIM, {})
    job(server)
    server.pod("bert", 0, "Running")
    asked = k8s("cancel", "bert", "--delete-claim")
    assert asked.code == 2
    assert "this needs confirmation" in asked.err
    assert JOB in server.objects

    done = k8s("cancel", "bert")
    assert (done.code, done.out) == (0, "Job bert is gone.\n")
    assert JOB not in server.objects
    assert CLAIM in server.objects
    again = k8s("cancel")
    assert again.out == "No job is running or queued in namespace ml of context lab.\n"


def test_delete_with_its_claim(k8s: K8s, server: KubernetesServer) -> None:
    server.put(CLAIM, {})
    job(server)
    done = k8s("cancel", "bert", "--yes", "--delete-claim", "--json")

    found = json.loads(done.out)
    assert (found["job"], found["state"], found["claim"]) == ("bert", "deleted", "spr-cluster")
    assert CLAIM not in server.objects


def test_delete_keeps_a_claim_that_others_use(k8s: K8s, server: KubernetesServer) -> None:
    server.put(CLAIM, {})
    job(server)
    server.pod("bert", 0, "Succeeded")
    server.put(f"{JOB}-large", server.objects[JOB] | {"metadata": {}})
    server.pod("bert-large", 0, "Succeeded")
    server.pod("notebook", 0, "Running")
    result = k8s("cancel", "bert", "--delete-claim", "--yes")

    assert (result.code, result.out) == (2, "")
    text = "claim spr-cluster is also that of job bert-large, pod notebook-master-0; nothing was deleted"
    assert text in result.err
    assert {JOB, CLAIM} <= server.objects.keys()


def test_delete_waits_for_the_claim(
    k8s: K8s, server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_CLAIM_DEADLINE_S", 0.05)
    monkeypatch.setattr(jobs, "_EVERY_S", 0.01)
    server.put(CLAIM, {})
    job(server)
    leaving = Answer(200, {"metadata": {"deletionTimestamp": "2026-11-22T14:25:01Z"}})
    server.fail = lambda method, path: leaving if path == CLAIM else None
    result = k8s("cancel", "bert", "--delete-claim", "--yes")

    assert (result.code, result.out) == (1, "Job bert is gone.\n")
    assert "spr-cluster: the end of claim spr-cluster" in result.err
    why = "it goes once no pod has it: kubectl --context lab -n ml describe pvc spr-cluster"
    assert why in " ".join(result.err.split())


@pytest.mark.parametrize("words", [(), ("--all",)])
def test_a_job_that_nobody_named_is_not_ended(
    k8s: K8s, server: KubernetesServer, words: tuple[str, ...]
) -> None:
    job(server)
    result = k8s("cancel", *words)

    assert (result.code, result.out) == (2, "")
    assert "name the job to end" in result.err
    assert JOB in server.objects


def test_delete_without_the_right_says_whose_it_lacks(k8s: K8s, server: KubernetesServer) -> None:
    job(server)
    server.denied = {("delete", "pytorchjobs")}
    result = k8s("cancel", "bert", "--yes")

    assert result.code == 1
    assert 'User "ada" cannot delete resource "pytorchjobs"' in result.err
    assert "  → request a role that allows it" in result.err
