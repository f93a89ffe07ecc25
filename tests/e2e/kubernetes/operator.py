"""A stand-in for Kubeflow's training-operator: it makes a PyTorchJob's pods."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from jobs.places.kubernetes.manifests import Manifest
from jobs.places.kubernetes.request import PYTORCH_JOB
from tests.e2e.kubernetes.control_plane import ControlPlane

_EVERY_S = 1.0


@contextmanager
def operating(plane: ControlPlane, namespace: str) -> Iterator[None]:
    """Take care of the jobs of a namespace as an operator on a cluster with nodes."""
    stop = Event()

    def operate() -> None:
        while not stop.wait(_EVERY_S):
            for job in plane.items("pytorchjobs", namespace):
                if "deletionTimestamp" not in job["metadata"]:
                    _reconcile(plane, namespace, job)

    with ThreadPoolExecutor(1) as pool:
        operator = pool.submit(operate)
        try:
            yield
        finally:
            stop.set()
            operator.result()


def _reconcile(plane: ControlPlane, namespace: str, job: Manifest) -> None:
    pods = {pod["metadata"]["name"]: pod for pod in plane.items("pods", namespace)}
    master, *workers = render_pods(job)
    name = master["metadata"]["name"]
    if name not in pods:
        plane.create(master, namespace)
    elif address := pods[name]["status"].get("podIP"):
        for worker in workers:
            # The real operator makes a service for the master's name; there is no DNS here.
            worker["spec"]["hostAliases"] = [{"ip": address, "hostnames": [name]}]
            if worker["metadata"]["name"] not in pods:
                plane.create(worker, namespace)


def render_pods(job: Manifest) -> list[Manifest]:
    """Return the pods of a job, the master first."""
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
    pod["metadata"] = {
        "name": f"{meta['name']}-{role.lower()}-{index}",
        "labels": {**pod["metadata"]["labels"], PYTORCH_JOB.pod_label: meta["name"]},
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
    if role == "Worker":
        # The real one waits for the master's name.
        small = {"cpu": "50m", "memory": "10Mi"}
        wait = {"name": "init-pytorch", "image": pod["spec"]["containers"][0]["image"]}
        wait |= {"command": ["true"], "imagePullPolicy": "IfNotPresent"}
        limits = {"cpu": "100m", "memory": "20Mi"}
        pod["spec"]["initContainers"] = [
            {**wait, "resources": {"requests": small, "limits": limits}}
        ]
    return {"apiVersion": "v1", "kind": "Pod", **pod}
