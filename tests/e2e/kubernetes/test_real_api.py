"""`train --to kubernetes-yaml --apply` against a real API server: Kubernetes 1.20.2.

No node runs the pods: they stay pending. Kubeflow's operator is a stand-in.
"""

from __future__ import annotations

from tests.e2e.kubernetes.conftest import MARKS, Space
from tests.e2e.kubernetes.operator import render_pods

JOB = ("squad", "--nodes", "2", "--demo", "--node-selector", "any", "--kind", "PyTorchJob")
BERT = (*JOB, "--image", "ghcr.io/me/spr:1", "--job-name", "bert")

pytestmark = MARKS


def test_a_dry_run_is_accepted_and_creates_nothing(space: Space) -> None:
    result = space.apply(*BERT, "--dry-run")

    assert result.code == 0, result.err
    assert result.out == "The cluster accepts job bert; nothing was created.\n"
    assert space.find("persistentvolumeclaims") == []
    assert space.find("pytorchjobs") == []


def test_the_life_of_a_job(space: Space) -> None:
    created = space.apply(*BERT)
    assert created.code == 0, created.err
    assert created.out.splitlines()[:2] == [
        "persistentvolumeclaim/spr-cluster created",
        "pytorchjob.kubeflow.org/bert created",
    ]
    again = space.apply(*BERT)
    assert (again.code, again.out) == (1, "")
    assert '"bert" already exists' in again.message

    (job,) = space.find("pytorchjobs")
    for pod in render_pods(job):
        space.plane.create(pod, space.name)
    pods = space.find("pods")
    # The operator's own container in workers has lower requests than limits.
    assert [pod["status"]["qosClass"] for pod in pods] == ["Guaranteed", "Burstable"]
    listed = space.kubectl("get", "pods", "--selector=training.kubeflow.org/job-name=bert")
    assert listed.count("Pending") == 2


def test_a_user_without_rights(space: Space) -> None:
    refused = space.apply(*BERT, user="bob")

    assert (refused.code, refused.out) == (1, "")
    assert 'User "bob" cannot' in refused.message
    assert space.find("pytorchjobs") == []
    stranger = space.apply(*BERT, user="stranger")
    assert stranger.code == 1
    assert "Unauthorized" in stranger.message or "must be logged in" in stranger.message


def test_a_refused_job_leaves_no_claim(space: Space) -> None:
    space.limit({"count/pytorchjobs.kubeflow.org": "0"})
    result = space.apply(*BERT)

    assert result.code == 1
    assert "exceeded quota: team" in result.message
    assert space.find("persistentvolumeclaims") == []


def test_a_second_job_where_a_quota_allows_one_claim(space: Space) -> None:
    space.limit({"persistentvolumeclaims": "1", "count/pytorchjobs.kubeflow.org": "2"})
    assert space.apply(*BERT).code == 0
    second = space.apply(*BERT, "--job-name", "two")

    assert second.code == 0, second.err
    assert second.out.splitlines()[0] == "pytorchjob.kubeflow.org/two created"


def test_a_kind_that_the_cluster_lacks(space: Space) -> None:
    result = space.apply(*BERT, "--kind", "TrainJob")

    assert (result.code, result.out) == (1, "")
    assert 'no matches for kind "TrainJob"' in result.message
    assert space.find("persistentvolumeclaims") == []


def test_a_namespace_that_does_not_exist(space: Space) -> None:
    result = space.apply(*BERT, "--namespace", "nowhere", user="admin")

    assert (result.code, result.out) == (1, "")
    assert '"nowhere" not found' in result.message
