"""A stand-in for Kubeflow's training-operator: it makes a PyTorchJob's pods, and says how they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from jobs.launchers.kubernetes.api import KubernetesApi
from jobs.launchers.kubernetes.errors import KubernetesError
from jobs.launchers.kubernetes.resources import core_path
from kubernetes.client import CustomObjectsApi

from jobs.launchers.kubernetes.manifests import Manifest

_LABEL = "training.kubeflow.org/job-name"
_EVERY_S = 0.2


@contextmanager
def operating(api: KubernetesApi, jobs: str) -> Iterator[None]:
    """Take care of the jobs of a namespace, whose path is given, as an operator on a cluster with nodes."""
    stop = Event()

    def operate() -> None:
        while not stop.wait(_EVERY_S):
            for job in api.items(jobs):
                if "deletionTimestamp" not in job["metadata"]:
                    _reconcile(api, jobs, job)

    with ThreadPoolExecutor(1) as pool:
        operator = pool.submit(operate)
        try:
            yield
        finally:
            stop.set()
            operator.result()


def make_pods(api: KubernetesApi, job: Manifest) -> None:
    """Make a job's pods; if the cluster refuses one, say so in an event, and stop."""
    namespace = job["metadata"]["namespace"]
    for pod in _render_pods(job):
        try:
            api.create(core_path(namespace, "pods"), pod)
        except KubernetesError as error:
            api.create(core_path(namespace, "events"), _render_event(job, error.message))
            return


def _reconcile(api: KubernetesApi, jobs: str, job: Manifest) -> None:
    meta = job["metadata"]
    path = core_path(meta["namespace"], "pods")
    pods = {pod["metadata"]["name"]: pod for pod in api.items(path, f"{_LABEL}={meta['name']}")}
    master, *workers = _render_pods(job)
    name = master["metadata"]["name"]
    if name not in pods:
        api.create(path, master)
    elif address := pods[name]["status"].get("podIP"):
        for worker in workers:
            # The real operator makes a service for the master's name; there is no DNS here.
            worker["spec"]["hostAliases"] = [{"ip": address, "hostnames": [name]}]
            if worker["metadata"]["name"] not in pods:
                api.create(path, worker)
    state = _find_state([pod["status"].get("phase") for pod in pods.values()])
    known = job.get("status", {}).get("conditions") or [{"type": None}]
    if state and known[-1]["type"] != state:
        group, version = job["apiVersion"].split("/")
        where = (group, version, meta["namespace"], "pytorchjobs", meta["name"])
        status = {"conditions": [{"type": state, "status": "True"}], "replicaStatuses": {}}
        CustomObjectsApi(api.client).patch_namespaced_custom_object_status(
            *where, {"status": status}
        )


def _find_state(phases: Sequence[str]) -> str | None:
    """Return the condition of a job whose pods have these phases, the master's first."""
    if "Failed" in phases:
        return "Failed"
    return phases[0] if phases and phases[0] in ("Running", "Succeeded") else None


def _render_pods(job: Manifest) -> list[Manifest]:
    """Return the pods, the master first."""
    replicas = job["spec"]["pytorchReplicaSpecs"]
    roles = [
        (role, index)
        for role in ("Master", "Worker")
        for index in range(replicas.get(role, {}).get("replicas", 0))
    ]
    return [
        _render_pod(job, role, index, rank, len(roles)) for rank, (role, index) in enumerate(roles)
    ]


def _render_pod(job: Manifest, role: str, index: int, rank: int, nodes: int) -> Manifest:
    meta, replica = job["metadata"], job["spec"]["pytorchReplicaSpecs"][role]
    pod = copy.deepcopy(replica["template"])
    labels = {
        _LABEL: meta["name"],
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
    variables = {
        "PET_NNODES": nodes,
        "PET_NODE_RANK": rank,
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PET_MASTER_ADDR": f"{meta['name']}-master-0",
        "PET_MASTER_PORT": 23456,
    }
    pod["spec"]["containers"][0].setdefault("env", []).extend(
        {"name": key, "value": str(value)} for key, value in variables.items()
    )
    pod["spec"]["restartPolicy"] = replica["restartPolicy"]
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def _render_event(job: Manifest, message: str) -> Manifest:
    meta = job["metadata"]
    about = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
    about |= {key: meta[key] for key in ("name", "uid", "namespace")}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}-"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedCreatePod",
        "message": f"Error creating: {message}",
    }
