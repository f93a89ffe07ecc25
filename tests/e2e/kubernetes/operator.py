"""A stand-in for Kubeflow's training-operator: it makes a PyTorchJob's pods, and nothing else."""

from __future__ import annotations

import copy

from jobs.kubernetes.api import KubernetesApi
from jobs.kubernetes.errors import KubernetesError
from jobs.kubernetes.manifests import Manifest
from jobs.kubernetes.resources import core_path


def make_pods(api: KubernetesApi, namespace: str, job: Manifest) -> None:
    """Make the pods; if the cluster refuses one, say so in an event, and stop."""
    replicas = job["spec"]["pytorchReplicaSpecs"]
    roles = [
        (role, index)
        for role in ("Master", "Worker")
        for index in range(replicas.get(role, {}).get("replicas", 0))
    ]
    for rank, (role, index) in enumerate(roles):
        pod = _render_pod(job, role, index)
        name = job["metadata"]["name"]
        variables = {
            "PET_NNODES": len(roles),
            "PET_NODE_RANK": rank,
            "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
            "PET_MASTER_ADDR": f"{name}-master-0",
            "PET_MASTER_PORT": 23456,
        }
        pod["spec"]["containers"][0].setdefault("env", []).extend(
            {"name": key, "value": str(value)} for key, value in variables.items()
        )
        try:
            api.create(core_path(namespace, "pods"), pod)
        except KubernetesError as error:
            api.create(core_path(namespace, "events"), _render_event(job, namespace, error.message))
            return


def _render_pod(job: Manifest, role: str, index: int) -> Manifest:
    meta, replica = job["metadata"], job["spec"]["pytorchReplicaSpecs"][role]
    pod = copy.deepcopy(replica["template"])
    labels = {
        "training.kubeflow.org/job-name": meta["name"],
        "training.kubeflow.org/replica-type": role.lower(),
        "training.kubeflow.org/replica-index": str(index),
    }
    pod["metadata"] = {
        "name": f"{meta['name']}-{role.lower()}-{index}",
        "labels": {**pod.get("metadata", {}).get("labels", {}), **labels},
        "ownerReferences": [
            {
                **{key: job[key] for key in ("apiVersion", "kind")},
                **{key: meta[key] for key in ("name", "uid")},
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    pod["spec"]["restartPolicy"] = replica["restartPolicy"]
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def _render_event(job: Manifest, namespace: str, message: str) -> Manifest:
    meta = job["metadata"]
    about = {"kind": job["kind"], "name": meta["name"], "uid": meta["uid"], "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}-"},
        "involvedObject": {**about, "apiVersion": job["apiVersion"]},
        "type": "Warning",
        "reason": "FailedCreatePod",
        "message": f"Error creating: {message}",
    }
