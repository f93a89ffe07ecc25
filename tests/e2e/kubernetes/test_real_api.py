"""`k8s submit`, `jobs`, `logs`, and `cancel` against a real API server: Kubernetes 1.20.2.

No node runs the pods: they stay pending. Kubeflow's operator is a stand-in.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.e2e.kubernetes.conftest import MARKS, Space
from tests.e2e.kubernetes.control_plane import ADMIN
from tests.harness.command_line import CommandResult
from tests.jobs.launchers.kubernetes.scenes import AMX, IMAGE

SUBMIT = ("submit", "squad", "--nodes", "2", "--demo", "--any-cpu", *IMAGE, "--kind", "PyTorchJob")
BERT = (*SUBMIT, "--name", "bert")
NFS = {"nfs": {"server": "127.0.0.1", "path": "/"}}

pytestmark = MARKS


def message(result: CommandResult) -> list[str]:
    """Return what a failed command says: its message without the steps before it."""
    lines = result.err.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("spr-cluster: "))
    return lines[start:]


def advice(shown: list[str], problem: str) -> str:
    """Return the line below that with a problem."""
    return shown[next(at for at, line in enumerate(shown) if problem in line) + 1]


def test_a_dry_run_is_accepted_and_creates_nothing(space: Space) -> None:
    result = space.run(*BERT, "--dry-run")

    assert result.code == 0, result.err
    assert result.out == (
        "The cluster accepts PersistentVolumeClaim and PyTorchJob of job bert; nothing was created.\n"
    )
    assert space.find("persistentvolumeclaims") == []
    assert space.api.items(space.jobs) == []


def test_the_life_of_a_job(space: Space) -> None:
    submitted = space.run(*BERT, "--detach")
    assert submitted.code == 0, submitted.err
    assert submitted.out.splitlines()[0] == "PyTorchJob bert, 2 pods, new claim spr-cluster"

    for words in ((), ("--dry-run",)):
        again = space.run(*BERT, "--detach", *words)
        assert (again.code, again.out) == (2, "")
        assert message(again)[0] == "spr-cluster: job bert exists already"

    space.make_pods()
    pods = space.find("pods")
    assert [pod["status"]["qosClass"] for pod in pods] == ["Guaranteed", "Guaranteed"]
    shown = space.wait_for_status("no nodes available to schedule pods (and 1 other pod)")
    assert shown[1].split()[:2] == ["bert", "queued"]
    for name in ("bert-master-0", "bert-worker-0"):
        assert f"pod {name}: Pending on -, 0 restarts" in shown
    log = space.run("logs", "bert")
    assert (log.code, message(log)[0]) == (
        2,
        "spr-cluster: job bert has no log yet: no node can take pod bert-master-0: no nodes available to "
        "schedule pods (and 1 other pod)",
    )
    listed = json.loads(space.run("jobs", "--json").out)
    assert [job["job"] for job in listed["jobs"]] == ["bert"]

    gone = space.run("cancel", "bert")
    assert (gone.code, gone.out) == (0, "Job bert is gone.\n"), gone.err
    assert space.find("pods") == []
    assert space.api.items(space.jobs) == []
    claims = space.find("persistentvolumeclaims")
    assert [each["metadata"]["name"] for each in claims] == ["spr-cluster"]
    again = space.run("cancel", "bert")
    assert (again.code, again.out) == (0, "Job bert has ended already: it is deleted.\n")


def test_a_user_without_rights(space: Space) -> None:
    refused = space.run(*BERT, user="bob")
    assert (refused.code, refused.out) == (2, "")
    assert message(refused)[0] == "spr-cluster: 6 problems; nothing was created:"
    found = [line.strip() for line in message(refused)]
    assert f"you may not create pytorchjobs in namespace {space.name}" in found

    for words in (("jobs",), ("jobs", "bert"), ("cancel", "bert")):
        result = space.run(*words, user="bob")
        assert (result.code, result.out) == (1, "")
        text, fix = message(result)
        assert 'is forbidden: User "bob" cannot' in text
        assert fix == "  → request a role that allows it from the cluster's administrator"
    assert space.api.items(space.jobs) == []


def test_an_unknown_token(space: Space) -> None:
    result = space.run("jobs", user="stranger")

    assert result.code == 1
    assert message(result)[0] == (
        "spr-cluster: the cluster refuses the credentials of context stranger: invalid or expired"
    )


def test_a_quota_that_the_user_may_read(space: Space) -> None:
    space.limit({"pods": "1"})
    result = space.run(*BERT, "--detach", user=ADMIN)

    assert result.code == 2
    assert message(result)[0] == "spr-cluster: quota team: pods would be exceeded: 0 of 1 used"
    assert space.find("persistentvolumeclaims") == []


def test_a_quota_that_only_the_cluster_knows(space: Space) -> None:
    space.limit({"count/pytorchjobs.kubeflow.org": "0"})
    result = space.run(*BERT, "--detach")

    assert result.code == 1
    text, fix = message(result)
    assert "exceeded quota: team, requested: count/pytorchjobs.kubeflow.org=1, used" in text
    assert fix == "  → request less, delete what is not needed, or have the quota raised"
    assert space.find("persistentvolumeclaims") == []


def test_pods_that_a_quota_refuses(space: Space) -> None:
    space.limit({"pods": "0"})
    assert space.run(*BERT, "--detach").code == 0
    space.make_pods()

    shown = space.run("jobs", "bert")
    assert "no pods: Error creating: " in shown.out
    assert "exceeded quota: team, requested: pods=1, used: pods=0, limited: pods=0" in shown.out
    assert shown.out.endswith("  → request less, or have the quota raised\n")


def test_a_second_job_where_a_quota_allows_one_claim(space: Space) -> None:
    space.limit({"persistentvolumeclaims": "1", "count/pytorchjobs.kubeflow.org": "2"})
    assert space.run(*BERT, "--detach").code == 0
    second = space.run(*SUBMIT, "--name", "two", "--detach")

    assert second.code == 0, second.err
    assert second.out.splitlines()[0] == "PyTorchJob two, 2 pods, existing claim spr-cluster"
    for user in ("ada", ADMIN):
        again = space.run(*BERT, "--detach", user=user)
        assert (again.code, message(again)[0]) == (2, "spr-cluster: job bert exists already")

    shared = space.run("cancel", "two", "--delete-claim", "--yes")
    assert (shared.code, shared.out) == (2, "")
    text = "claim spr-cluster is also that of job bert; nothing was deleted"
    assert message(shared)[0] == f"spr-cluster: {text}"
    assert space.run("cancel", "bert").code == 0
    last = space.run("cancel", "two", "--delete-claim", "--yes")
    assert (last.code, last.out) == (0, "Job two is gone.\nClaim spr-cluster is gone.\n"), last
    assert space.find("persistentvolumeclaims") == []


@pytest.mark.usefixtures("small_node")
def test_why_no_node_takes_a_pod(space: Space) -> None:
    warned = space.run(*BERT, "--detach", user=ADMIN)
    assert warned.code == 0
    assert "warning: 0 of 1 suitable node can have a pod of 62 CPUs and 460 GiB" in warned.err
    space.make_pods()
    shown = space.wait_for_status("pod has unbound immediate PersistentVolumeClaims")
    assert advice(shown, "unbound") == "  → `kubectl describe pvc` says why the claim has no volume"

    space.give_volume(NFS)
    shown = space.wait_for_status("1 Insufficient cpu, 1 Insufficient memory")
    # The other pod may still wait for the volume.
    assert advice(shown, "1 Insufficient cpu").startswith("  → describe the nodes with --cores")
    (claim,) = space.find("persistentvolumeclaims")
    assert claim["status"]["phase"] == "Bound"


@pytest.mark.usefixtures("small_node")
def test_no_node_has_the_label(space: Space) -> None:
    words = [word for word in BERT if word != "--any-cpu"]
    warned = space.run(*words, "--detach", user=ADMIN)
    assert f"warning: no node has the label {AMX}" in warned.err
    space.give_volume(NFS)
    space.make_pods()
    shown = space.wait_for_status("1 node(s) didn't match")
    assert advice(shown, "didn't match").startswith("  → no node has the label for AMX: install")


def test_a_kind_that_the_cluster_lacks(space: Space) -> None:
    result = space.run(*BERT, "--kind", "TrainJob")

    assert (result.code, result.out) == (2, "")
    assert message(result) == [
        "spr-cluster: context ada: the cluster has no TrainJob",
        "  → it has PyTorchJob: omit --kind; or install Kubeflow Trainer 2.2 or newer",
    ]


def test_a_namespace_that_does_not_exist(space: Space) -> None:
    result = replace(space, name="nowhere").run(*BERT, user=ADMIN)

    assert (result.code, result.out) == (2, "")
    assert message(result)[0] == "spr-cluster: namespace nowhere doesn't exist"
